"""Tensors not yet read, and the blocks in which they are streamed."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_convert.convert.tensor import (
    Array,
    ArrayTensor,
    Box,
    Tensor,
    ancestry,
    blocks,
    cast,
    extent,
    slices,
    whole,
)
from gemma_convert.convert.vocabulary import FirstRows

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def counted(shape: tuple[int, ...]) -> Array:
    """An array whose values tell their place in memory."""
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


class Watched(ArrayTensor):
    """Remembers which boxes were read."""

    def __init__(self, array: Array) -> None:
        super().__init__(array)
        self.seen: list[Box] = []

    def read(self, box: Box) -> Array:
        self.seen.append(box)
        return super().read(box)


@given(SHAPES, st.integers(1, 200))
def test_blocks_tile_a_tensor_in_memory_order(shape: tuple[int, ...], block_bytes: int) -> None:
    """Appended one after the other they are the tensor; none is larger than it may be."""
    tensor = ArrayTensor(counted(shape))
    parts = [tensor.read(box) for box in blocks(tensor, block_bytes)]
    assert all(0 < part.nbytes <= max(block_bytes, tensor.dtype.itemsize) for part in parts)
    appended = b"".join(part.tobytes() for part in parts)
    assert appended == tensor.array.tobytes()


@given(SHAPES, st.integers(1, 200))
def test_blocks_are_contiguous_pieces_of_memory(shape: tuple[int, ...], block_bytes: int) -> None:
    array = counted(shape)
    for box in blocks(ArrayTensor(array), block_bytes):
        places = array[slices(box)].ravel()
        assert (np.diff(places) == 1).all()


@given(SHAPES.filter(lambda shape: 0 not in shape), st.integers(1, 200))
def test_blocks_are_not_needlessly_small(shape: tuple[int, ...], block_bytes: int) -> None:
    """Two neighbours that make one box along the axis cut would not fit into a block."""
    tensor = ArrayTensor(counted(shape))
    listed = list(blocks(tensor, block_bytes))
    for one, two in pairwise(listed):
        joined = [(a[0], b[1]) for a, b in zip(one, two, strict=True)]
        differ = [a != b for a, b in zip(one, two, strict=True)]
        if sum(differ) == 1:
            assert np.prod(extent(tuple(joined))) * 4 > block_bytes


def test_blocks_of_a_scalar_and_of_nothing() -> None:
    assert list(blocks(ArrayTensor(np.float32(3.5)[()].reshape(())))) == [()]
    assert list(blocks(ArrayTensor(np.zeros((3, 0, 2))))) == []


def test_rows_are_cut_when_one_alone_is_too_long() -> None:
    tensor = ArrayTensor(np.zeros((2, 5), np.float32))
    assert list(blocks(tensor, 12)) == [
        ((0, 1), (0, 3)),
        ((0, 1), (3, 5)),
        ((1, 2), (0, 3)),
        ((1, 2), (3, 5)),
    ]


def test_size_and_bytes() -> None:
    tensor = ArrayTensor(np.zeros((3, 5), BF16))
    assert (tensor.size, tensor.nbytes) == (15, 30)
    assert whole((3, 5)) == ((0, 3), (0, 5))
    assert extent(((1, 3), (2, 5))) == (2, 3)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1 + 2**-8, 1.0),  # a tie goes to the even neighbour, below
        (1 + 3 * 2**-8, 1 + 2**-6),  # and above
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (0.3, 0.30078125),
    ],
)
def test_a_cast_rounds_to_nearest_even(value: float, rounded: float) -> None:
    assert cast(ArrayTensor(np.float32([value])), BF16).numpy().tolist() == [rounded]


def test_a_cast_reads_no_more_than_it_is_asked_for() -> None:
    source = Watched(counted((4, 5)))
    result = cast(source, BF16)
    assert result.dtype == BF16
    assert source.seen == []
    assert result.read(((1, 2), (2, 4))).tolist() == [[7.0, 8.0]]
    assert source.seen == [((1, 2), (2, 4))]


def test_a_cast_to_the_same_dtype_is_the_tensor_itself() -> None:
    tensor = ArrayTensor(np.zeros(3, BF16))
    assert cast(tensor, BF16) is tensor


def test_ancestry_reaches_back_to_what_lies_on_the_disk() -> None:
    stored: Tensor = ArrayTensor(np.zeros(3, np.float32))
    narrow = cast(stored, BF16)
    short = FirstRows(narrow, 2)
    assert list(ancestry(short)) == [short, narrow, stored]


def test_a_cast_of_a_cast_rounds_once() -> None:
    """In float16 first, 1 + 2**-8 + 2**-12 would become a tie and round the other way."""
    value = np.float32([1 + 2**-8 + 2**-12])
    twice = cast(cast(ArrayTensor(value), np.dtype(np.float16)), BF16)
    assert twice.numpy() == value.astype(BF16) != value.astype(np.float16).astype(BF16)
