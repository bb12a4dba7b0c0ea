"""Casts between float32 and bfloat16, bit for bit those of ml_dtypes and several times faster.

A bfloat16 is the upper half of a float32, so both ways are integer arithmetic that numpy does with
vector instructions; ml_dtypes 0.5 goes value by value. All other casts are numpy's.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)

_EXPONENT = np.uint16(0x7F80)
"""The exponent's bits of a bfloat16, all set in infinities and NaN."""


def converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """``array`` in ``dtype``, to nearest even; itself if it has that dtype."""
    if array.dtype == BFLOAT16 and dtype == FLOAT32:
        return _widened(array)
    # NaN keeps its sign alone, which is for ml_dtypes to say.
    if array.dtype == FLOAT32 and dtype == BFLOAT16 and not np.isnan(array).any():
        return _narrowed(array)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype, copy=False)


def all_finite(array: Array) -> bool:
    """Whether no value is infinite or NaN."""
    if array.dtype == BFLOAT16:
        return bool((array.view(np.uint16) & _EXPONENT != _EXPONENT).all())
    return bool(np.isfinite(array).all())


def _widened(array: Array) -> Array:
    bits = np.empty(array.shape, np.uint32)
    bits[...] = array.view(np.uint16)
    np.left_shift(bits, 16, out=bits)
    return bits.view(np.float32)


def _narrowed(array: Array) -> Array:
    """Add half a unit in the last place, or a bit less where the upper half is even; cut."""
    bits = array.view(np.uint32)
    result = np.right_shift(bits, 16, out=np.empty(array.shape, np.uint32))
    np.bitwise_and(result, 1, out=result)
    np.add(result, 0x7FFF, out=result)
    np.add(result, bits, out=result)
    np.right_shift(result, 16, out=result)
    return result.astype(np.uint16).view(BFLOAT16)
