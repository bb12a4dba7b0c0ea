"""The Orbax reader, and the one that tells the format: compared with orbax itself, and refusals.

``tests/data/orbax_samples`` was written by Tunix 0.1.7 and orbax 0.12.8.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_checkpoint, open_orbax
from gemma_convert.convert.readers.orbax_tensor import CACHE_BYTES, OrbaxTensor, along_chunks
from gemma_convert.convert.tensor import Box, blocks, slices

SAMPLES = Path(__file__).parents[1] / "data" / "orbax_samples"
TREES = (
    "full_base/10/model_params",
    "lora_only/10/model_params",
    "lora_only/10/optimizer_state",
    "qlora_int4_full/10/model_params",
    "qlora_int8_full/10/model_params",
    "pytree_no_ocdbt",
    "pytree_zarr3",
    "standard_flat",
    "standard_nested",
)


def leaves(tree: Any, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """A restored tree as name to array."""
    if isinstance(tree, dict):
        parts = [leaves(value, (*keys, str(key))) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        parts = [leaves(value, (*keys, str(i))) for i, value in enumerate(tree)]
    else:
        return {".".join(keys): tree}
    return {name: leaf for part in parts for name, leaf in part.items()}


def restored(path: Path) -> dict[str, np.ndarray]:
    """What orbax itself restores, as numpy arrays."""
    import jax
    import orbax.checkpoint as ocp

    checkpointer = ocp.PyTreeCheckpointer()
    structure = checkpointer.metadata(path).item_metadata.tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure)
    return leaves(checkpointer.restore(path, restore_args=args))


def save(path: Path, tree: Any, *, ocdbt: bool = True, zarr3: bool = False, **more: Any) -> Path:
    """Save a tree as one of its own."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, **more))
    return path


def read_all(path: Path) -> None:
    for tensor in open_orbax(path).values():
        tensor.numpy()


def copy(sample: str, to: Path) -> Path:
    shutil.copytree(SAMPLES / sample, to)
    return to


def edit(path: Path, change: Any) -> None:
    """Change a JSON file in place."""
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def unfinished_bucket_copy(step: Path) -> None:
    """Make a step what an unfinished save in a bucket looks like once it was copied."""
    (step / "commit_success.txt").unlink()
    edit(step / "_CHECKPOINT_METADATA", lambda table: table.update(commit_timestamp_nsecs=None))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with steps 9 (full), 10 (LoRA, the newest finished) and two unfinished ones."""
    copy("full_base/10", tmp_path / "root" / "9")
    copy("lora_only/10", tmp_path / "root" / "10")
    copy("lora_only/10", tmp_path / "root" / "20.orbax-checkpoint-tmp")
    unfinished_bucket_copy(copy("lora_only/10", tmp_path / "root" / "30"))
    return tmp_path / "root"


# Reading


@pytest.mark.parametrize("sample", TREES)
def test_equals_orbax_bit_for_bit(sample: str) -> None:
    checkpoint = open_orbax(SAMPLES / sample)
    suffix = ".value" if checkpoint.metadata["tree_value_suffix"] else ""
    expected = restored(SAMPLES / sample)
    dropped = set(checkpoint.dropped)
    assert {name + suffix for name in checkpoint} == set(expected) - dropped
    assert all(expected[name] is None or expected[name] == {} for name in dropped & set(expected))
    for name, tensor in checkpoint.items():
        array = np.asarray(expected[name + suffix])
        assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
        assert tensor.numpy().tobytes() == array.tobytes()
        assert tensor.numpy().flags.c_contiguous


def test_names_are_those_on_the_disk() -> None:
    full = open_orbax(SAMPLES / "full_base")
    assert "layers.0.attn.q_einsum.w" in full
    assert full.metadata["tree_value_suffix"] is True
    flat = open_orbax(SAMPLES / "pytree_no_ocdbt")
    assert list(flat) == [
        "transformer/embedder.input_embedding",
        "transformer/layer_0/attn/q_einsum.w",
        "transformer/layer_0/mlp/gating_einsum.w",
    ]
    assert all((SAMPLES / "pytree_no_ocdbt" / name / ".zarray").is_file() for name in flat)
    assert flat.metadata["tree_value_suffix"] is False


def test_value_stays_where_not_every_array_has_it(tmp_path: Path) -> None:
    tree = {"layers": {"10": {"value": np.ones(2)}, "2": {"value": np.ones(3)}}, "w": np.ones(5)}
    checkpoint = open_orbax(save(tmp_path / "t", tree))
    assert list(checkpoint) == ["layers.2.value", "layers.10.value", "w"]


def test_int4_is_ml_dtypes_int4() -> None:
    tensor = open_orbax(SAMPLES / "qlora_int4_full")["layers.0.attn.q_einsum.w.array.qvalue"]
    assert tensor.dtype == ml_dtypes.int4
    values = tensor.numpy().astype(np.int8)
    assert values.min() < 0 < values.max() <= 7


@pytest.mark.parametrize(("ocdbt", "zarr3"), [(True, False), (False, False), (False, True)])
def test_every_kind_of_leaf(tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    tree = {
        "list": [np.arange(3), np.array([True, False])],
        "half": np.array([[1.5, -2.0]], ml_dtypes.bfloat16),
        "count": 3,
        "a b": {"x.y": np.ones((2, 3))},
        **{"none": None, "text": "hi", "dict": {}, "empty": []},
    }
    path = save(tmp_path / "t", tree, ocdbt=ocdbt, zarr3=zarr3)
    checkpoint = open_orbax(path)
    assert list(checkpoint) == ["a b.x.y", "count", "half", "list.0", "list.1"]
    assert checkpoint["count"].numpy() == 3
    assert checkpoint["list.0"].numpy().tolist() == [0, 1, 2]
    assert checkpoint["half"].numpy().astype(float).tolist() == [[1.5, -2.0]]
    assert checkpoint.dropped == {
        "dict": "it is an empty dict",
        "empty": "it is an empty list",
        "none": "it is None",
        "text": "it is a string",
    }


def test_scalar_without_an_array_is_dropped(tmp_path: Path) -> None:
    path = save(tmp_path / "t", {"count": 3, "w": np.ones(2)}, ocdbt=False)
    shutil.rmtree(path / "count")
    checkpoint = open_orbax(path)
    assert list(checkpoint) == ["w"]
    assert checkpoint.dropped == {"count": "it is a scalar without an array on the disk"}


def test_array_saved_on_many_devices(tmp_path: Path) -> None:
    """Saved in four shards by another process: write_shape is the shard's, (2, 6) of (8, 6)."""
    code = f"""
import jax, jax.numpy as jnp, orbax.checkpoint as ocp
mesh = jax.make_mesh((4,), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
array = jax.device_put(jnp.arange(48.0).reshape(8, 6), sharding)
ocp.PyTreeCheckpointer().save({str(tmp_path / "t")!r}, {{"a": array}})
"""
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True)
    tensor = open_orbax(tmp_path / "t")["a"]
    assert isinstance(tensor, OrbaxTensor)
    assert (tensor.shape, tensor.chunk) == ((8, 6), (2, 6))
    assert tensor.numpy().tolist() == np.arange(48.0).reshape(8, 6).tolist()


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append((start, draw(st.integers(start, size))))
    return tuple(box)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, OrbaxTensor]:
    """An array of shape (7, 9, 5) in chunks of (3, 4, 5), as a zarr of its own under _METADATA."""
    import tensorstore as ts

    array = np.random.default_rng(0).integers(0, 2**16, (7, 9, 5)).astype(np.uint16)
    path = save(tmp_path_factory.mktemp("chunked") / "t", {"a": array}, ocdbt=False)
    shutil.rmtree(path / "a")
    store = ts.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{path / 'a'}/"},
            "metadata": {"shape": [7, 9, 5], "chunks": [3, 4, 5], "dtype": "<u2"},
        },
        create=True,
    ).result()
    store.write(array).result()
    tensor = open_orbax(path)["a"]
    assert isinstance(tensor, OrbaxTensor)
    return array, tensor


@given(boxes_of((7, 9, 5)), st.sampled_from([1, 2, 1000]))
def test_any_box_equals_the_slice(
    chunked: tuple[np.ndarray, OrbaxTensor], box: Box, at_once: int
) -> None:
    array, tensor = chunked
    tensor._cache.limit = at_once * tensor.chunk_bytes
    found = tensor.read(box)
    np.testing.assert_array_equal(found, array[slices(box)], strict=True)
    assert found.flags.c_contiguous


def test_box_outside_the_shape_is_refused(chunked: tuple[np.ndarray, OrbaxTensor]) -> None:
    for box in (((0, 8), (0, 9), (0, 5)), ((-1, 2), (0, 9), (0, 5)), ((0, 7),)):
        with pytest.raises(IndexError, match="is not inside shape"):
            chunked[1].read(box)


@given(boxes_of((20, 30)), st.integers(1, 9))
def test_pieces_cover_the_box_and_touch_few_chunks(box: Box, limit: int) -> None:
    covered = np.zeros((20, 30), int)
    for piece in along_chunks(box, (3, 7), limit):
        covered[slices(piece)] += 1
        touched = {(r // 3, c // 7) for r in range(*piece[0]) for c in range(*piece[1])}
        assert len(touched) <= limit
    expected = np.zeros((20, 30), int)
    expected[slices(box)] = 1
    np.testing.assert_array_equal(covered, expected)


def test_chunk_is_decoded_once_for_all_blocks(tmp_path: Path) -> None:
    """With the chunk's file gone after the first block, the rest comes from the cache."""
    array = np.random.default_rng(0).normal(size=(64, 10))
    path = save(tmp_path / "t", {"a": array}, ocdbt=False)
    tensor = open_orbax(path)["a"]
    first, *rest = list(blocks(tensor, 800))
    assert len(rest) == 6
    found = [tensor.read(first)]
    (path / "a" / "0.0").unlink()
    found += [tensor.read(box) for box in rest]
    assert np.concatenate(found).tobytes() == array.tobytes()


def test_cache_holds_the_largest_chunk_and_not_more(tmp_path: Path) -> None:
    small = open_orbax(save(tmp_path / "s", {"a": np.ones(9)}))["a"]
    assert isinstance(small, OrbaxTensor)
    assert small._cache.limit == CACHE_BYTES
    big = np.zeros(CACHE_BYTES + 11, np.uint8)
    checkpoint = open_orbax(save(tmp_path / "b", {"a": big, "b": np.ones(3)}))
    assert {t._cache.limit for t in checkpoint.values()} == {big.nbytes}  # type: ignore[attr-defined]


def test_threads_share_a_tensor() -> None:
    tensor = open_orbax(SAMPLES / "full_base")["embedder.input_embedding"]
    expected = tensor.numpy()
    boxes = [((row, row + 1), (0, expected.shape[1])) for row in range(expected.shape[0])]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(tensor.read, boxes))
    assert np.concatenate(rows).tobytes() == expected.tobytes()


def test_readers_import_nothing_heavy() -> None:
    def loaded(code: str) -> str:
        heavy = "{'jax', 'orbax', 'tensorstore', 'torch', 'transformers'}"
        probe = f"import sys; {code}; print(sorted({heavy} & set(sys.modules)))"
        run = [sys.executable, "-c", probe]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()

    readers = "from gemma_convert.convert.readers import open_orbax"
    assert loaded(readers) == "[]"
    opened = (
        f"{readers}; from pathlib import Path; open_orbax(Path({str(SAMPLES / 'full_base')!r}))"
    )
    assert loaded(opened) == "['tensorstore']"


# Roots, steps, items


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
    assert set(checkpoint.fingerprint) == {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"}


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


# Damage


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


# Telling the format


def test_detects_safetensors(tmp_path: Path) -> None:
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    for path in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        assert open_checkpoint(path).format == "safetensors"
        with pytest.raises(InputError, match="is safetensors, it has no step 3; leave the step"):
            open_checkpoint(path, step=3)


@pytest.mark.parametrize("sample", ["full_base", "full_base/10", *TREES])
def test_detects_orbax(sample: str) -> None:
    assert open_checkpoint(SAMPLES / sample).format == "orbax"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist; check the path; a Hub id is"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is an empty directory; give the directory with the"):
        open_checkpoint(tmp_path)
    with pytest.raises(InputError, match="s3://bucket/x: paths of s3:// are not read"):
        open_checkpoint("s3://bucket/x")


def test_files_of_other_kinds(tmp_path: Path) -> None:
    pointer = tmp_path / "weights"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match=r"is a Git LFS pointer, .* run `git lfs pull`"):
        open_checkpoint(pointer)
    (tmp_path / "x.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(InputError, match="is a GGUF file; GGUF holds quantised weights under"):
        open_checkpoint(tmp_path / "x.gguf")
    with pytest.raises(InputError, match=r"no safetensors, only x\.gguf; GGUF holds"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"cos\nsystem\n")
    with pytest.raises(InputError, match=r"is not a safetensors file; .* nothing is unpickled"):
        open_checkpoint(tmp_path / "model.pt")


def test_checkpoint_one_level_down(tmp_path: Path) -> None:
    copy("full_base", tmp_path / "run" / "orbax")
    with pytest.raises(InputError, match=f"not a checkpoint itself; give {tmp_path}/run/orbax$"):
        open_checkpoint(tmp_path / "run")
    (tmp_path / "run" / "hf").mkdir()
    save_file({"w": np.arange(3.0)}, tmp_path / "run" / "hf" / "model.safetensors")
    with pytest.raises(InputError, match=r"give .*/run/hf or .*/run/orbax$"):
        open_checkpoint(tmp_path / "run")


def test_directory_of_something_else(tmp_path: Path) -> None:
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text("x")
    with pytest.raises(
        InputError,
        match=r"holds neither safetensors nor an Orbax checkpoint, but 0\.txt, 1\.txt, 2\.txt, "
        r"3\.txt, 4\.txt and 2 more; give the directory",
    ):
        open_checkpoint(tmp_path)
