"""The Orbax reader: what it reads, compared with orbax itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.readers.orbax_tensor import CACHE_BYTES, OrbaxTensor, along_chunks
from gemma_convert.convert.tensor import Box, blocks, slices
from tests.orbax_files import SAMPLES, TREES, restored, save


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
