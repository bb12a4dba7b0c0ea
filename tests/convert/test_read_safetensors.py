"""The safetensors reader: what it reads of one file."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from gemma_convert.convert import dtypes
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_safetensors, read_file
from gemma_convert.convert.readers.names import in_natural_order
from gemma_convert.convert.readers.safetensors_tensor import runs
from gemma_convert.convert.tensor import Box, blocks, slices
from tests.safetensors_files import GOLDEN, entry, model, random_tensors, raw


def test_golden_bytes(tmp_path: Path) -> None:
    path = tmp_path / "golden.safetensors"
    path.write_bytes(GOLDEN)
    checkpoint = open_safetensors(path)
    assert list(checkpoint) == ["a", "b"]
    assert checkpoint["b"].numpy().tolist() == [1, 2]
    assert checkpoint["a"].numpy().shape == ()
    assert checkpoint["a"].numpy() == np.float32(1.5)
    assert (checkpoint["b"].path, checkpoint["b"].offset) == (path, 114)  # type: ignore[attr-defined]
    assert checkpoint["a"].offset == 118  # type: ignore[attr-defined]


def test_equals_the_library_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(random_tensors(), path, {"format": "pt"})
    checkpoint = read_file(path)
    assert checkpoint.metadata["safetensors"] == {"format": "pt"}
    with safe_open(path, "numpy") as library:
        assert set(library.keys()) == set(checkpoint)
        for name, tensor in checkpoint.items():
            expected = library.get_tensor(name)
            assert tensor.dtype == expected.dtype
            assert tensor.shape == expected.shape
            assert tensor.numpy().tobytes() == expected.tobytes()
            assert tensor.numpy().flags.c_contiguous
            assert path.read_bytes()[tensor.offset :].startswith(expected.tobytes())  # type: ignore[attr-defined]


def test_blocks_join_to_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    array = np.random.default_rng(1).normal(size=(6, 5, 7)).astype(np.float32)
    save_file({"x": array}, path)
    tensor = read_file(path)["x"]
    parts = [tensor.read(box).tobytes() for box in blocks(tensor, 4 * 7 * 2)]
    assert len(parts) == 6 * 3
    assert b"".join(parts) == array.tobytes()


@st.composite
def shaped_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append((start, draw(st.integers(start, size))))
    return shape, tuple(box)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("boxes")


@given(shaped_boxes())
def test_any_box_equals_the_slice(scratch: Path, case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    save_file({"before": np.ones(3, np.uint8), "x": array}, scratch / "x.safetensors")
    found = read_file(scratch / "x.safetensors")["x"].read(box)
    np.testing.assert_array_equal(found, array[slices(box)], strict=True)
    assert found.flags.c_contiguous


def test_runs_are_as_long_as_can_be() -> None:
    def of(*box: tuple[int, int]) -> tuple[int, list[int]]:
        length, starts = runs(box, (4, 3, 5), 2)
        return length, list(starts)

    assert of((0, 4), (0, 3), (0, 5)) == (120, [0])
    assert of((1, 3), (0, 3), (0, 5)) == (60, [30])
    assert of((1, 2), (1, 3), (0, 5)) == (20, [40])
    assert of((1, 3), (1, 2), (0, 5)) == (10, [40, 70])
    assert of((0, 1), (1, 3), (2, 4)) == (4, [14, 24])


def test_box_outside_the_shape_is_refused(tmp_path: Path) -> None:
    save_file({"x": np.zeros((2, 3), np.uint8), "y": np.ones(9, np.uint8)}, tmp_path / "x")
    tensor = read_file(tmp_path / "x")["x"]
    for box in (((0, 3), (0, 3)), ((-1, 1), (0, 3)), ((0, 2),), ((2, 1), (0, 3))):
        with pytest.raises(ValueError, match="is not inside shape"):
            tensor.read(box)


def test_threads_share_a_tensor(tmp_path: Path) -> None:
    array = np.random.default_rng(2).integers(0, 255, (64, 1000), np.uint8)
    save_file({"x": array}, tmp_path / "x.safetensors")
    tensor = read_file(tmp_path / "x.safetensors")["x"]
    start = threading.Barrier(8)

    def work(worker: int) -> bool:
        start.wait()
        return all(
            (tensor.read(((row, row + 1), (worker, 900))) == array[row, worker:900]).all()
            for row in range(64)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", {f"{i}.safetensors": [f"t{i}"] for i in range(20)})
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_safetensors(directory)
    for tensor in checkpoint.values():
        tensor.numpy()
    assert len(os.listdir("/proc/self/fd")) == before


def test_natural_order() -> None:
    names = ["l2", "l.10.w", "l.2.w", "l.2.b", "a", "l.02.b", "l", "10", "9", f"l.{'9' * 5000}.w"]
    expected = [
        "9",
        "10",
        "a",
        "l",
        "l2",
        "l.02.b",
        "l.2.b",
        "l.2.w",
        "l.10.w",
        f"l.{'9' * 5000}.w",
    ]
    assert list(in_natural_order(dict.fromkeys(names))) == expected


@pytest.mark.parametrize("row", dtypes.SPELLINGS, ids=lambda row: row.safetensors)
def test_dtypes_agree_with_the_library(tmp_path: Path, row: dtypes.Spelling) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    path = tmp_path / "x.safetensors"
    size = row.numpy.itemsize
    data = bytes(range(1, 1 + size)) if row.safetensors != "BOOL" else b"\1"
    raw(path, {"a": entry(row.safetensors, [1], [0, size])}, data)
    assert load_file(path)["a"].dtype == getattr(torch, row.config)
    assert read_file(path)["a"].numpy().tobytes() == data
    assert dtypes.to_safetensors(row.numpy) == row.safetensors
    assert dtypes.from_safetensors(row.safetensors) == row.numpy
    assert dtypes.from_config(f"torch.{row.config}") == dtypes.from_config(row.config) == row.numpy
    assert dtypes.to_config(row.numpy) == row.config


def test_unknown_dtypes() -> None:
    with pytest.raises(InputError, match="dtype int4 cannot be stored in safetensors; cast it"):
        dtypes.to_safetensors(np.dtype(ml_dtypes.int4))
    with pytest.raises(InputError, match="dtype complex128 cannot"):
        dtypes.to_config(np.dtype(np.complex128))
    with pytest.raises(InputError, match="unknown dtype 'float4'; known are bfloat16"):
        dtypes.from_config("float4")
