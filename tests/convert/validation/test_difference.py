"""The numbers of a comparison, against numpy in float64 over whole arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.tensor import Array, ArrayTensor
from gemma_convert.convert.validation import difference
from gemma_convert.convert.validation.difference import Difference, compare

BF16 = np.dtype(ml_dtypes.bfloat16)
RANDOM = np.random.default_rng(0)


def compared(a: Array, b: Array) -> Difference:
    return compare(ArrayTensor(a), ArrayTensor(b))


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
@pytest.mark.parametrize("block", [8, 1 << 20])
def test_sums_are_those_of_float64(
    dtype: np.dtype[np.generic], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(difference, "BLOCK_BYTES", block)
    a = RANDOM.normal(0.3, 1.0, (7, 11)).astype(dtype)
    b = (a.astype(np.float64) + RANDOM.normal(0.0, 0.1, a.shape)).astype(dtype)
    b[2] = a[2]
    found = compared(a, b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert found.size == 77
    assert found.unequal == np.count_nonzero(x != y)
    assert found.max_abs == np.abs(y - x).max()
    # sums of 77 float64 numbers in another order
    assert found.relative == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-13)
    cosine = x.ravel() @ y.ravel() / np.linalg.norm(x) / np.linalg.norm(y)
    assert found.cosine == pytest.approx(cosine, rel=1e-13)
    assert not found.same_bytes


def test_same_bytes() -> None:
    a = RANDOM.normal(size=(5, 3)).astype(np.float32)
    found = compared(a, a.copy())
    assert found.same_bytes
    assert (found.unequal, found.max_abs, found.relative) == (0, 0.0, 0.0)
    assert found.cosine == pytest.approx(1.0)


def test_the_same_values_in_another_dtype_are_not_the_same_bytes() -> None:
    a = np.float32([1.0, 2.5])
    found = compared(a, a.astype(BF16))
    assert (found.same_bytes, found.unequal) == (False, 0)


def test_a_zero_of_the_other_sign_is_an_equal_value_of_other_bytes() -> None:
    found = compared(np.float32([0.0, 1.0]), np.float32([-0.0, 1.0]))
    assert (found.same_bytes, found.unequal) == (False, 0)


def test_what_is_not_finite_is_counted_apart() -> None:
    a = np.float32([1.0, np.nan, np.inf, 2.0])
    b = np.float32([np.nan, np.nan, np.inf, 5.0])
    found = compared(a, b)
    assert (found.unequal, found.not_finite, found.max_abs) == (2, 1, 3.0)


def test_against_nothing_there_is_no_relative_difference() -> None:
    found = compared(np.zeros(3, np.float32), np.float32([1, 2, 2]))
    assert (found.relative, found.cosine, found.max_abs) == (None, None, 2.0)


def test_scalars_and_empty_tensors() -> None:
    assert compared(np.float32(2.0).reshape(()), np.float32(3.0).reshape(())).max_abs == 1.0
    assert compared(np.zeros((0, 3)), np.zeros((0, 3))).same_bytes


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_beyond_the_reach_of_float64(dtype: type[np.integer[Any]]) -> None:
    a = np.array([2**53 + 1, 7, np.iinfo(dtype).max], dtype)
    b = np.array([2**53, 7, np.iinfo(dtype).min], dtype)
    found = compare(ArrayTensor(a), ArrayTensor(b))
    assert (found.unequal, found.max_abs) == (2, 2.0**64)  # the nearest float64 to 2^64 - 1
    assert compare(ArrayTensor(a[:2]), ArrayTensor(b[:2])).d_range == (-1.0, 0.0)
    assert compare(ArrayTensor(b[:2]), ArrayTensor(a[:2])).d_range == (0.0, 1.0)


@pytest.mark.parametrize("size", [1e200, 1e-200, 3e-308, 1.1e150])
def test_values_whose_squares_float64_does_not_hold(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over blocks of other sizes too, one of them of usual values."""
    monkeypatch.setattr(difference, "BLOCK_BYTES", 5 * 8)
    a = RANDOM.normal(0.3, 1.0, (7, 5))
    b = a + RANDOM.normal(0.0, 0.1, a.shape)
    found = compared(a * size, b * size)
    relative = np.linalg.norm(b - a) / np.linalg.norm(a)
    # those near the least float64 have few digits
    close = {"rel": 1e-12 if size > 1e-300 else 1e-7}
    assert found.relative == pytest.approx(relative, **close)
    cosine = a.ravel() @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b)
    assert found.cosine == pytest.approx(cosine, **close)
    assert found.max_abs == np.abs(b * size - a * size).max()
    larger = slice(1, None) if size > 1 else slice(0, 1)  # beside these the others are nothing
    relative = np.linalg.norm((b - a)[larger]) / np.linalg.norm(a[larger])
    a[1:], b[1:] = a[1:] * size, b[1:] * size
    assert compared(a, b).relative == pytest.approx(relative, **close)


def test_values_as_far_apart_as_float64_reaches() -> None:
    found = compared(np.array([1.5e308, 1.0]), np.array([-1.5e308, 1.0]))
    assert (found.max_abs, found.relative, found.not_finite) == (np.inf, 2.0, 0)
