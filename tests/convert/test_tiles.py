"""Tiles: the shape of the chunks that are written, and that reading them decodes each once."""

from __future__ import annotations

from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.read_ahead import read_ahead
from gemma_convert.convert.readers.orbax import open_orbax
from gemma_convert.convert.readers.orbax_tensor import OrbaxTensor
from gemma_convert.convert.stack import Stacked
from gemma_convert.convert.tensor import ArrayTensor, Cast, Tensor, Zeros, slices
from gemma_convert.convert.tiles import tile_shape, tiles
from gemma_convert.convert.writers.orbax import write_orbax
from gemma_convert.convert.writers.orbax_tree import CHUNK_BYTES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def zeros(*shape: int) -> Zeros:
    return Zeros(shape, BFLOAT16)


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 200))
def test_tiles_cover_a_tensor_once(shape: list[int], most_bytes: int) -> None:
    tensor = zeros(*shape)
    covered = np.zeros(shape, int)
    for box in tiles(tensor, most_bytes):
        assert prod(stop - start for start, stop in box) * 2 <= max(2, most_bytes)
        covered[slices(box)] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5376, 21504), (2688, 3072)),  # an MLP kernel of Gemma 4 31B
        ((262144, 5376), (3085, 2688)),  # its embedding
        ((32, 5376, 256), (6, 5376, 256)),  # queries of whole heads
        ((128, 704, 2816), (4, 704, 2816)),  # experts
        ((5376,), (5376,)),
        ((), ()),
    ],
)
def test_shapes_of_real_tensors(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tile_shape(zeros(*shape), CHUNK_BYTES) == expected


def stacked(count: int, *shape: int) -> Stacked:
    return Stacked({(i,): zeros(*shape) for i in range(count)}, 1)


def test_a_tile_holds_one_of_stacked_layers() -> None:
    tensor = stacked(60, 5376, 21504)
    assert tensor.shape == (5376, 60, 21504)
    assert tile_shape(tensor, CHUNK_BYTES) == (2688, 1, 3072)


def test_stacked_layers_are_seen_behind_what_keeps_their_axes() -> None:
    tensor = Cast(stacked(3, 5, 7), np.dtype(np.float32))
    assert tensor.stacked_axes == {1}
    assert tile_shape(tensor, 1 << 20) == (5, 1, 7)


class Transposed(Tensor):
    """The columns of a matrix as rows."""

    def __init__(self, parent: Tensor) -> None:
        self.parent = parent
        self.shape = parent.shape[::-1]
        self.dtype = parent.dtype

    def read(self, box: tuple[tuple[int, int], ...]) -> np.ndarray:
        return self.parent.read(box[::-1]).T


def test_columns_read_each_chunk_once(tmp_path: Path) -> None:
    """With a cache of a third of the matrix; chunks of whole rows would be read a hundred times."""
    bits = np.random.default_rng(0).integers(0, 1 << 16, (4000, 5000), np.uint16)
    write_orbax(Checkpoint({"w": ArrayTensor(bits)}), tmp_path, block_bytes=400_000)
    tensor = open_orbax(tmp_path)["w"]
    assert isinstance(tensor, OrbaxTensor)
    tensor._cache.limit = 4 << 20
    before = bytes_read()
    place = 0
    for block in read_ahead({"w": Transposed(tensor)}, 400_000):
        stop = place + len(block.array)
        assert np.array_equal(block.array, bits.T[place:stop])
        place = stop
    assert place == 5000
    assert bits.nbytes * 0.9 < bytes_read() - before < bits.nbytes * 1.2  # random bits: no zip


def bytes_read() -> int:
    """Bytes that tensorstore has read from files in this process."""
    import tensorstore as ts

    name = "/tensorstore/kvstore/file/bytes_read"
    found = ts.experimental_collect_matching_metrics(name)
    return sum(value["value"] for one in found for value in one["values"])
