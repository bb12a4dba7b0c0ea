"""Which step and which item of an Orbax checkpoint root is opened."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_checkpoint, open_orbax
from tests.orbax_files import copy, save, step_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return step_root(tmp_path)


def test_root_gives_the_newest_finished_step(root: Path) -> None:
    checkpoint = open_checkpoint(root)
    assert checkpoint.source == str(root / "10" / "model_params")
    assert checkpoint.metadata == {
        "custom_metadata": {"k": 1},
        "step": 10,
        "item": "model_params",
        "items": ["model_params", "optimizer_state"],
        "steps": [9, 10],
        "tree_value_suffix": True,
    }
    assert checkpoint.notes == (
        f"skipped unfinished: 20.orbax-checkpoint-tmp, 30 in {root}",
        "read the item model_params; left alone: optimizer_state",
    )
    heads = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"}
    assert set(checkpoint.fingerprint) == {*heads, "*"}


def test_steps_agree_with_orbax(root: Path) -> None:
    from orbax.checkpoint import utils

    (root / "30").rename(root / "30.orbax-checkpoint-tmp")
    assert open_orbax(root).metadata["steps"] == sorted(utils.checkpoint_steps(root))


def test_a_requested_step(root: Path) -> None:
    assert "final_norm.scale" in open_checkpoint(root, step=9)
    for step in (11, 20, 30):
        with pytest.raises(
            InputError,
            match=rf"has no finished step {step}; finished steps there: 9, 10; unfinished: "
            r"20\.orbax-checkpoint-tmp, 30; give one of these",
        ):
            open_checkpoint(root, step=step)


@pytest.mark.parametrize("given", ["10", "10/model_params"])
def test_step_or_item_given_directly(root: Path, given: str) -> None:
    checkpoint = open_orbax(root / given)
    assert checkpoint.metadata["step"] == 10
    assert checkpoint.metadata["steps"] == [10]
    assert checkpoint.metadata["item"] == "model_params"
    assert checkpoint.metadata["items"] == ["model_params", "optimizer_state"]
    assert checkpoint.metadata["custom_metadata"] == {"k": 1}
    assert open_orbax(root / given, step=10).source == checkpoint.source
    with pytest.raises(InputError, match="is not step 9; give the checkpoint's root"):
        open_orbax(root / given, step=9)


def test_the_other_item(root: Path) -> None:
    checkpoint = open_orbax(root, item="optimizer_state")
    assert checkpoint.metadata["item"] == "optimizer_state"
    assert checkpoint.notes[1:] == ("read the item optimizer_state; left alone: model_params",)
    with pytest.raises(
        InputError, match="has no item 'x'; items there: model_params, optimizer_state"
    ):
        open_orbax(root, item="x")
    with pytest.raises(InputError, match="is one tree, it has no item 'x'"):
        open_orbax(root / "10" / "model_params", item="x")


def test_default_item(root: Path) -> None:
    step = root / "9"
    (step / "model_params").rename(step / "items")
    copy("lora_only/10/optimizer_state", step / "opt")
    assert open_orbax(step).metadata["item"] == "items"
    shutil.copytree(step / "items", step / "params")
    message = (
        rf"no single item of weights; items there: items, opt, params; give .*{step / 'items'}"
    )
    with pytest.raises(InputError, match=message):
        open_orbax(step)


@pytest.mark.parametrize("names", [("step_9", "step_10"), ("x_y_000009", "x_y_000010")])
def test_step_prefixes(root: Path, names: tuple[str, str]) -> None:
    for old, new in zip(("9", "10"), names, strict=True):
        (root / old).rename(root / new)
    assert open_orbax(root).metadata["steps"] == [9, 10]
    assert open_orbax(root / names[0]).metadata["step"] == 9
    shutil.copytree(root / names[1], root / "10")
    with pytest.raises(InputError, match=rf"holds step 10 twice: 10 and {names[1]}; give the one"):
        open_orbax(root)


def test_steps_that_are_trees_themselves(tmp_path: Path) -> None:
    for step in (9, 10):
        save(tmp_path / "root" / str(step), {"w": np.full(2, step)})
    checkpoint = open_checkpoint(tmp_path / "root")
    assert checkpoint["w"].numpy().tolist() == [10, 10]
    assert (checkpoint.metadata["step"], checkpoint.metadata["item"]) == (10, "")
    assert open_orbax(tmp_path / "root" / "9").metadata["step"] == 9


def test_a_tree_called_like_a_step_is_none(tmp_path: Path) -> None:
    path = save(tmp_path / "gemma_2", {"w": np.ones(2)}, custom_metadata={"rank": 4})
    checkpoint = open_orbax(path)
    assert checkpoint.metadata["step"] is None
    assert checkpoint.metadata["custom_metadata"] == {"rank": 4}


def test_unfinished_saves(root: Path) -> None:
    for name in ("20.orbax-checkpoint-tmp", "20.orbax-checkpoint-tmp/model_params", "30"):
        with pytest.raises(InputError, match="unfinished Orbax save; give a finished step"):
            open_checkpoint(root / name)
    (root / "20.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(InputError, match="unfinished Orbax save; give a finished step"):
        open_checkpoint(root / "20.orbax-checkpoint-tmp" / "model_params")
    shutil.rmtree(root / "9")
    shutil.rmtree(root / "10")
    with pytest.raises(InputError, match=r"no finished step; unfinished: 20\.orbax.*, 30; save it"):
        open_checkpoint(root)


def test_a_commit_file_alone_is_enough(root: Path) -> None:
    (root / "30" / "commit_success.txt").write_text("Checkpoint commit was successful")
    assert open_orbax(root).metadata["steps"] == [9, 10, 30]


def test_step_that_holds_only_unfinished_items(root: Path) -> None:
    (root / "9" / "model_params").rename(root / "9" / "model_params.orbax-checkpoint-tmp")
    with pytest.raises(InputError, match=r"is unfinished: it holds only .*model_params\.orbax"):
        open_orbax(root / "9")


def test_no_tree_there(tmp_path: Path) -> None:
    tree = copy("standard_flat", tmp_path / "t")
    (tree / "_METADATA").unlink()
    with pytest.raises(InputError, match="holds Orbax data but no _METADATA: it was cut short"):
        open_checkpoint(tree)
    shutil.rmtree(tree)
    tree.mkdir()
    with pytest.raises(InputError, match="holds no Orbax tree: no _METADATA in it"):
        open_orbax(tree)
