"""Links in inputs: those of the Hub's cache are followed, those to someone's keys are not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.file_download import _create_symlink, repo_folder_name

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_base, open_checkpoint
from tests.checkpoints import (
    GEMMA3,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    run_cli,
    snapshot,
    write_base,
    write_run,
)

LEAVES = "is a link out of the directory, to {}; copy what it points to into the directory"
FILES = {"tokenizer.json": '{"version": "1.0"}', "additional_chat_templates/tool.jinja": "x"}


def base(directory: Path) -> Path:
    return write_base(directory, GEMMA3, base_arrays(GEMMA3, "model."), shards=2, files=FILES)


def secret(tmp_path: Path) -> Path:
    """A file that nobody wants to publish."""
    path = tmp_path / "home" / ".ssh" / "id_ed25519"
    path.parent.mkdir(parents=True)
    path.write_text("a key")
    return path


def hub_cache(directory: Path, files: Path) -> Path:
    """A snapshot as huggingface_hub lays it out: its own function makes the links."""
    repo = directory / repo_folder_name(repo_id="org/name", repo_type="model")
    revision = repo / "snapshots" / "0123abcd"
    for number, path in enumerate(sorted(p for p in files.rglob("*") if p.is_file())):
        blob = repo / "blobs" / f"{number:040x}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        pointer = revision / path.relative_to(files)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        _create_symlink(str(blob), str(pointer))
        assert pointer.is_symlink()
    return revision


@pytest.mark.parametrize("through", ["itself", "a link"])
def test_a_model_in_the_hubs_cache(tmp_path: Path, through: str) -> None:
    found = hub_cache(tmp_path / "hub", base(tmp_path / "m"))
    if through == "a link":
        (tmp_path / "l").symlink_to(found, target_is_directory=True)
        found = tmp_path / "l"
    checkpoint = open_checkpoint(found)
    assert {name: path.read_text() for name, path in checkpoint.files.items()} == dict(
        sorted(FILES.items())
    )
    assert_same_bits(arrays(checkpoint), base_arrays(GEMMA3, "model."))


def test_an_orbax_run_in_the_hubs_cache(tmp_path: Path) -> None:
    values = factor_arrays(GEMMA3)
    found = hub_cache(tmp_path / "hub", write_run(tmp_path / "r", values))
    assert_same_bits(arrays(open_checkpoint(found)), values)


def test_weights_may_be_links_to_anywhere(tmp_path: Path) -> None:
    directory = base(tmp_path / "m")
    for number, path in enumerate(sorted(directory.glob("*.safetensors"))):
        (tmp_path / "disk").mkdir(exist_ok=True)
        path.symlink_to(path.rename(tmp_path / "disk" / str(number)))
    assert_same_bits(arrays(open_checkpoint(directory)), base_arrays(GEMMA3, "model."))


def test_a_side_file_may_be_a_link_inside(tmp_path: Path) -> None:
    directory = base(tmp_path / "m")
    (directory / ".store").mkdir()
    real = (directory / "tokenizer.json").rename(directory / ".store" / "t")
    (directory / "tokenizer.json").symlink_to(real.relative_to(directory))
    assert open_checkpoint(directory).files["tokenizer.json"].read_text() == FILES["tokenizer.json"]


@pytest.mark.parametrize("name", ["notes.txt", "additional_chat_templates/tool.jinja"])
@pytest.mark.parametrize("place", ["folder", "hub"])
def test_a_side_file_that_leaves(tmp_path: Path, name: str, place: str) -> None:
    target = secret(tmp_path)
    directory = base(tmp_path / "m")
    if place == "hub":
        directory = hub_cache(tmp_path / "hub", directory)
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(target)
    for opener in (open_checkpoint, open_base):
        with pytest.raises(InputError, match=re.escape(f"{name} {LEAVES.format(target)}")):
            opener(directory)


def test_a_folder_of_side_files_that_leaves(tmp_path: Path) -> None:
    target = secret(tmp_path)
    directory = base(tmp_path / "m")
    shutil.rmtree(directory / "additional_chat_templates")
    (directory / "additional_chat_templates").symlink_to(target.parent, target_is_directory=True)
    with pytest.raises(InputError, match=re.escape(f"id_ed25519 {LEAVES.format(target)}")):
        open_checkpoint(directory)


def test_a_folder_of_blobs_that_leaves(tmp_path: Path) -> None:
    """A cache that came as an archive: its ``blobs`` is itself a link."""
    target = secret(tmp_path)
    directory = hub_cache(tmp_path / "hub", base(tmp_path / "m"))
    blobs = directory.parent.parent / "blobs"
    for path in directory.rglob("*"):
        if path.is_symlink():
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
    shutil.rmtree(blobs)
    blobs.symlink_to(target.parent, target_is_directory=True)
    (directory / "notes.txt").symlink_to(f"../../blobs/{target.name}")
    with pytest.raises(InputError, match=re.escape(f"notes.txt {LEAVES.format(target)}")):
        open_checkpoint(directory)


@pytest.mark.parametrize("name", ["d", "_sharding", "more"])
def test_an_orbax_tree_with_a_link_that_leaves(tmp_path: Path, name: str) -> None:
    target = secret(tmp_path)
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    path = run / "0" / "model_params" / name
    if path.is_dir():
        target = path.rename(tmp_path / "elsewhere")
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    with pytest.raises(InputError, match=re.escape(f"{name} {LEAVES.format(target)}")):
        open_checkpoint(run)


def test_an_orbax_step_may_be_a_link(tmp_path: Path) -> None:
    values = factor_arrays(GEMMA3)
    run = write_run(tmp_path / "run", values)
    (run / "0").symlink_to((run / "0").rename(tmp_path / "moved"), target_is_directory=True)
    assert_same_bits(arrays(open_checkpoint(run)), values)


def test_nothing_is_copied_or_written(tmp_path: Path, capsys: Any) -> None:
    target = secret(tmp_path)
    directory = base(tmp_path / "m")
    (directory / "notes.txt").symlink_to(target)
    before = snapshot(tmp_path)
    words = ["hf-to-orbax", directory, "--layout", "tunix", "--out", tmp_path / "out"]
    assert run_cli(*words) == 1
    assert re.fullmatch(
        r"error: [^\n]*is a link out of the directory[^\n]*\n", capsys.readouterr().err
    )
    assert snapshot(tmp_path) == before


def test_a_name_with_a_newline_is_not_carried(tmp_path: Path) -> None:
    directory = base(tmp_path / "m")
    (directory / "a\nb.json").write_text(json.dumps({}))
    with pytest.raises(
        InputError, match=r"holds a file called 'a\\nb.json', with control characte"
    ):
        open_checkpoint(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "other"])
def test_a_link_in_a_circle(tmp_path: Path, name: str) -> None:
    """It leads to no file: what is asked of it is no error of ours."""
    folder = base(tmp_path / "base")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)
    words = ["hf-to-orbax", folder, "--layout", "tunix", "--out", tmp_path / "out", "--quiet"]
    assert run_cli(*words) == 0
    assert not (tmp_path / "out" / name).exists()


@pytest.mark.parametrize("model_type", [["gemma3"], {}, 3])
def test_a_model_type_that_is_no_text(tmp_path: Path, capsys: Any, model_type: Any) -> None:
    nested = {"model_type": "gemma3", "text_config": {**GEMMA3, "model_type": model_type}}
    write_base(tmp_path / "base", nested, base_arrays(GEMMA3, "language_model.model."))
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    words = ["orbax-to-hf", run, "--base", tmp_path / "base", "--alpha", 5]
    run_cli(*words, "--out", tmp_path / "out")
    assert "a bug here" not in capsys.readouterr().err
