"""The fast casts against ml_dtypes, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.casting import BFLOAT16, FLOAT32, all_finite, converted
from gemma_convert.convert.tensor import Array

ALL = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
"""Every bfloat16: zeros, subnormals, infinities, NaN with every payload."""

NAN = (ALL.view(np.uint16) & 0x7FFF) > 0x7F80


def reference(array: Array, dtype: Any) -> Array:
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def same(found: Array, expected: Array) -> bool:
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


def test_every_bfloat16_widened() -> None:
    assert same(converted(ALL, FLOAT32), reference(ALL, np.float32))


def test_every_bfloat16_comes_back() -> None:
    numbers = ALL[~NAN]
    assert same(converted(converted(numbers, FLOAT32), BFLOAT16), numbers)


@pytest.mark.parametrize("low", [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
def test_every_upper_half_narrowed(low: int) -> None:
    """With lower halves around the ties: half a unit, and a bit beside it."""
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16) | low
    values = bits.view(np.float32)
    assert same(converted(values, BFLOAT16), reference(values, BFLOAT16))
    finite = values[np.isfinite(values)]  # by the integer arithmetic, since no NaN is among them
    assert same(converted(finite, BFLOAT16), reference(finite, BFLOAT16))


@pytest.mark.parametrize("seed", range(4))
def test_random_bits_narrowed(seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 1 << 18, np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    assert values.size > 1 << 17
    assert same(converted(values, BFLOAT16), reference(values, BFLOAT16))


def test_ties_go_to_even_and_the_largest_becomes_infinite() -> None:
    """By hand: 1 + 2^-8 lies between 1 and 1 + 2^-7."""
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4028235e38, -0.0, 1e-45], FLOAT32)
    narrow = converted(values, BFLOAT16).astype(np.float64)
    assert narrow.tolist() == [1.0, 1.015625, -1.0, np.inf, 0.0, 0.0]
    assert np.signbit(narrow).tolist() == [False, False, True, False, True, False]


@pytest.mark.parametrize(
    "take",
    [
        lambda a: a[3:7].reshape(()) if a.size == 1 else a[5],
        lambda a: a.reshape(256, 256).T,
        lambda a: a.reshape(256, 256)[:, ::3],
        lambda a: a[::-1],
        lambda a: a[:0],
        lambda a: a[7:8].reshape(()),
    ],
    ids=["scalar", "T", "stride", "reversed", "empty", "0d"],
)
def test_any_shape_and_stride(take: Any) -> None:
    narrow = np.asarray(take(ALL))
    wide = np.asarray(take(np.where(NAN, 1, ALL).astype(np.float32) * np.float32(1.003)))
    with np.errstate(all="ignore"):
        assert same(converted(narrow, FLOAT32), np.asarray(reference(narrow, np.float32)))
        assert same(converted(wide, BFLOAT16), np.asarray(reference(wide, BFLOAT16)))


@pytest.mark.parametrize(
    ("old", "new"),
    [("f4", "f4"), ("f8", "f4"), ("f4", "f2"), ("f8", BFLOAT16), (BFLOAT16, "f8"), ("i4", "f4")],
)
def test_other_casts_are_numpys(old: Any, new: Any) -> None:
    values = np.array([0.0, 1.1, -70000.3, 2.0**20 + 1]).astype(old)
    assert same(converted(values, np.dtype(new)), reference(values, new))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_finite(dtype: Any) -> None:
    largest = ml_dtypes.finfo(dtype).max
    assert all_finite(np.array([largest, -largest, 0, -0.0], dtype))
    assert all_finite(np.array([], dtype))
    for bad in (np.inf, -np.inf, np.nan):
        assert not all_finite(np.array([[1, 2], [bad, 3]], dtype))
