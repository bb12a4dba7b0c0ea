"""What a difference looks like: tensors exchanged, rows moved, an offset, a factor, a constant.

Each guess is checked against the values before it is said: a sentence here is a fact about the
two checkpoints, only its cause is left to the reader.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.tensor import Array, Tensor, blocks
from gemma_convert.convert.validation.difference import Difference, paired_blocks
from gemma_convert.convert.validation.rank import ulp

_EXACT = 1e-12
"""Relative error of sums in float64 over values that are equal but for a factor."""

_FITTED = 1e-9
"""How far a fitted factor may be off."""

_WHOLE = 2**53
"""From here on float64 does not tell an integer from the next."""

_DOMINATED = 100
"""By how much the square of a factor's effect exceeds what it does not explain."""


def digest(tensor: Tensor) -> str:
    """sha256 of the tensor's bytes in memory order, whatever its shape."""
    found = hashlib.sha256()
    for box in blocks(tensor):
        found.update(np.ascontiguousarray(tensor.read(box)).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def exchanged(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], differing: Iterable[str]
) -> dict[str, str]:
    """For tensors of ``b`` that hold the bytes of another tensor of ``a``, whose they are."""
    names = list(differing)
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(digest(a[name]), []).append(name)
    found: dict[str, str] = {}
    for name in names:
        others = [o for o in owners.get(digest(b[name]), []) if o != name]
        if others:
            found[name] = f"holds what the first has as {others[0]}"
    return found


def values(a: Tensor, b: Tensor, difference: Difference) -> str:
    """Whether ``b`` is a constant, or ``a`` with an offset or a factor; empty if not.

    Args:
        a: The first's tensor.
        b: The second's, of the same shape.
        difference: Of the two.
    """
    low, high = difference.b_range
    if low == high and difference.size > 0:
        return f"every value is {low:g}"
    low, high = difference.d_range
    if high - low <= abs(high) / 100 and low * high > 0:
        return f"every value is off by {(low + high) / 2:+.3g}"
    if not difference.a2 or not difference.b2 or difference.size < 2:
        return ""
    factor = difference.ab / difference.a2
    # |b - factor a|^2, relative to |b|^2
    rest = 1 - difference.ab**2 / (difference.a2 * difference.b2)
    # what is left is far smaller than what the factor does, as it is where products were rounded
    if _DOMINATED * rest >= (factor - 1) ** 2 or not _is_product(a, b, factor):
        return ""
    if rest <= _EXACT:
        return f"every value is multiplied by {factor:.6g}"
    return f"every value is multiplied by {factor:.3g} and rounded"


def _is_product(a: Tensor, b: Tensor, factor: float) -> bool:
    """Whether each value of ``b`` is that of ``a`` times ``factor``, to a unit in the last place.

    The product is half a unit away if it was rounded once; the factor, fitted, may be off by less.
    Integers are the product itself; where float64 does not hold them, nothing is said.
    One so near to 1 that values could be unchanged as well is none.
    """
    if dtypes.is_float(a.dtype) != dtypes.is_float(b.dtype):
        return False
    is_float = dtypes.is_float(b.dtype)
    unit = float(ml_dtypes.finfo(b.dtype).eps) if is_float else 0.0
    if abs(factor - 1) <= 2 * (unit + _FITTED):
        return False
    told = float(f"{factor:.6g}")
    if not is_float and abs(told - factor) <= _FITTED * abs(told):
        factor = told  # a fit would share out what is left
    for x, y in paired_blocks(a, b):
        wide = y.astype(np.float64)
        old = x.astype(np.float64)
        if not is_float and max(np.abs(v).max(initial=0) for v in (old, wide)) >= _WHOLE:
            return False
        with np.errstate(invalid="ignore", over="ignore"):
            left = np.abs(wide - factor * old)
            allowed = _FITTED * np.abs(wide)
            allowed = allowed + ulp(y, b.dtype) if is_float else np.minimum(allowed, 0.25)
            if not np.all(left <= allowed):
                return False
    return True


def moved_rows(a: Tensor, b: Tensor) -> str:
    """Whether ``b`` holds rows of ``a`` at other places; empty if not.

    A row is what the last axis holds; the axes before it are counted as one.
    """
    if len(a.shape) < 2 or a.shape != b.shape or a.dtype != b.dtype:
        return ""
    before, after = _row_hashes(a), _row_hashes(b)
    origin = {row: i for i, row in enumerate(before)}
    if len(origin) < len(before):  # rows that repeat say nothing
        return ""
    moved = [(i, origin[row]) for i, row in enumerate(after) if origin.get(row, i) != i]
    changed = sum(x != y for x, y in zip(before, after, strict=True))
    if not moved or 2 * len(moved) < changed:
        return ""
    to, of = moved[0]
    by = _shift([of - to for to, of in moved], len(before))
    return (
        f"{len(moved)} of {len(before)} rows hold another row of the first{by}: "
        f"row {_index(to, a.shape)} is the first's {_index(of, a.shape)}"
    )


def _shift(shifts: Sequence[int], rows: int) -> str:
    """By how much rows were moved, where that is the same for all, but for the end's wrap."""
    counts = Counter(shifts).most_common()
    if len(counts) == 1:
        return f", all by {counts[0][0]:+d}"
    if len({shift % rows for shift in shifts}) > 1:
        return ""
    told = " and ".join(f"{count} by {shift:+d}" for shift, count in counts)
    return f", {told}, around the end"


def _row_hashes(tensor: Tensor) -> list[bytes]:
    found: list[bytes] = []
    for box in blocks(tensor):
        rows: Array = np.ascontiguousarray(tensor.read(box))
        # a block may end inside a row only where one row is larger than a block
        rows = rows.reshape(-1, rows.shape[-1])
        found += [hashlib.blake2b(row.tobytes(), digest_size=12).digest() for row in rows]
    return found


def _index(row: int, shape: tuple[int, ...]) -> str:
    return str([int(i) for i in np.unravel_index(row, shape[:-1])])
