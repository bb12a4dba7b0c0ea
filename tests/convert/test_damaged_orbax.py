"""Orbax checkpoints that are damaged or hostile: each is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_orbax
from tests.orbax_files import copy, edit, read_all, save, step_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return step_root(tmp_path)


def test_array_missing_on_the_disk(tmp_path: Path) -> None:
    tree = copy("pytree_no_ocdbt", tmp_path / "t")
    shutil.rmtree(tree / "transformer" / "layer_0" / "attn" / "q_einsum.w")
    with pytest.raises(
        InputError,
        match=r"_METADATA names the tensor 'transformer/layer_0/attn/q_einsum\.w', which is not on "
        "the disk; copy the checkpoint again",
    ):
        open_orbax(tree)


def test_array_missing_in_ocdbt(tmp_path: Path) -> None:
    tree = copy("standard_flat", tmp_path / "t")
    more = {"key_metadata": [{"key": "z"}], "value_metadata": {"value_type": "np.ndarray"}}
    edit(tree / "_METADATA", lambda table: table["tree_metadata"].update(z=more))
    with pytest.raises(InputError, match="names the tensor 'z', which is not on the disk"):
        open_orbax(tree)


def test_missing_chunk_is_no_zeros(tmp_path: Path) -> None:
    path = save(tmp_path / "t", {"a": np.ones((2, 3))}, ocdbt=False)
    (path / "a" / "0.0").unlink()
    with pytest.raises(InputError, match=r"tensor 'a' in .*/t cannot be read: .*; copy the check"):
        open_orbax(path)["a"].numpy()


def test_corrupt_chunk(tmp_path: Path) -> None:
    path = save(tmp_path / "t", {"a": np.arange(600.0).reshape(20, 30)}, ocdbt=False)
    chunk = path / "a" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-20])
    tensor = open_orbax(path)["a"]
    with pytest.raises(InputError, match=r"tensor 'a' in .*/t cannot be read: .*; copy the check"):
        tensor.read(((0, 1), (0, 30)))


def test_corrupt_ocdbt_data(tmp_path: Path) -> None:
    tree = copy("full_base/10/model_params", tmp_path / "t")
    for data in tree.rglob("d/*"):
        data.write_bytes(b"\0" * data.stat().st_size)
    with pytest.raises(InputError, match=r"tensor '.*' in .*/t cannot be read: .*; copy the"):
        read_all(tree)


def test_manifest_missing(tmp_path: Path) -> None:
    tree = copy("standard_flat", tmp_path / "t")
    (tree / "manifest.ocdbt").unlink()
    with pytest.raises(InputError, match=r"has no manifest\.ocdbt, which _METADATA announces"):
        open_orbax(tree)


@pytest.mark.parametrize("shape", [[64, 31], [65, 32], [64], [64, 32, 1], [128, 32], [0, 32]])
def test_write_shape_that_disagrees(tmp_path: Path, shape: list[int]) -> None:
    tree = copy("standard_flat", tmp_path / "t")

    def change(table: Any) -> None:
        leaf = table["tree_metadata"]["('transformer/embedder', 'input_embedding')"]
        leaf["value_metadata"]["write_shape"] = shape

    edit(tree / "_METADATA", change)
    with pytest.raises(
        InputError,
        match=r"'transformer/embedder\.input_embedding' in .* has shape \(64, 32\), but _METADATA "
        "says it was written in shards of",
    ):
        open_orbax(tree)


def leaf(keys: Any = ("w",), kind: Any = "np.ndarray", **more: Any) -> dict[str, Any]:
    return {
        "key_metadata": [{"key": key} for key in keys],
        "value_metadata": {"value_type": kind, **more},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "_METADATA is not valid JSON"),
        ("[]", "_METADATA must be a JSON object, found list"),
        ('{"tree_metadata": {}, "tree_metadata": {}}', "holds the key 'tree_metadata' twice"),
        ("{}", "_METADATA has no tree_metadata"),
        ({"a": 7}, "leaf 'a' is no object"),
        ({"a": {"key_metadata": []}}, "leaf 'a' needs key_metadata and value_metadata"),
        ({"a": leaf([])}, "leaf 'a' needs key_metadata"),
        ({"a": leaf([None])}, r"leaf 'a' has keys that are no strings: \[None\]"),
        ({"a": leaf([True])}, r"leaf 'a' has keys that are no strings: \[True\]"),
        ({"a": leaf(kind=None)}, "leaf 'a' has no value_type: None"),
        ({"a": leaf(write_shape=[-1])}, r"write_shape that is no list of sizes: \[-1\]"),
        ({"a": leaf(write_shape="2")}, "write_shape that is no list of sizes: '2'"),
        ({"a": leaf(["../../x"])}, r"name that is no path inside the checkpoint: '\.\./\.\./x'"),
        ({"a": leaf(["/etc", "x"])}, r"no path inside the checkpoint: '/etc\.x'"),
        ({"a": leaf(["x\0y"])}, "no path inside the checkpoint"),
        (
            {"a": leaf(["x.y", "z"]), "b": leaf(["x", "y.z"])},
            r"leaves \('x\.y', 'z'\) and \('x', 'y\.z'\) are both called 'x\.y\.z' on the disk",
        ),
    ],
)
def test_hostile_metadata(tmp_path: Path, text: Any, message: str) -> None:
    tree = copy("standard_flat", tmp_path / "t")
    table = {"tree_metadata": text, "use_ocdbt": True}
    (tree / "_METADATA").write_text(text if isinstance(text, str) else json.dumps(table))
    with pytest.raises(InputError, match=message):
        open_orbax(tree)


def test_hostile_custom_metadata(root: Path) -> None:
    edit(root / "10" / "_CHECKPOINT_METADATA", lambda table: table.update(custom_metadata=[1]))
    with pytest.raises(InputError, match=r"custom_metadata must be an object, found \[1\]"):
        open_orbax(root)
