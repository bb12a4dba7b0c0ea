"""How two tensors of one shape differ, block by block, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array, Box, Tensor, blocks

BLOCK_BYTES = 4 << 20
"""Blocks are widened to float64, which takes up to eight times their bytes."""

_LEAST, _MOST = 1e-60, 1e60
"""Between these float64 holds products of four values, and sums of them: all of float32 that
matters, and more."""


@dataclass(frozen=True)
class Difference:
    """Sums over the values of two tensors a and b, and over d = b - a.

    Values that are not finite on both sides and not the same bits are counted apart. The sums of
    squares and products are divided by ``4 ** exponent``, so that float64 holds them: their
    ratios alone mean something.

    Attributes:
        size: Number of values.
        same_bytes: Whether dtype and every bit are the same.
        unequal: Number of values that differ.
        not_finite: Number of those of which one is NaN or infinite.
        max_abs: Largest ``|d|``.
        d2: Sum of d squared.
        a2: Sum of a squared.
        b2: Sum of b squared.
        ab: Sum of a times b.
        d_range: Least and greatest d.
        b_range: Least and greatest b; NaN where one is.
        exponent: Of the sums, 0 unless values are very large or very small.
    """

    size: int = 0
    same_bytes: bool = True
    unequal: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    d2: float = 0.0
    a2: float = 0.0
    b2: float = 0.0
    ab: float = 0.0
    d_range: tuple[float, float] = (np.inf, -np.inf)
    b_range: tuple[float, float] = (np.inf, -np.inf)
    exponent: int = 0

    @property
    def relative(self) -> float | None:
        """Frobenius norm of d over that of a; None where a is all zero and b is not."""
        if self.d2 == 0:
            return 0.0
        return float(np.sqrt(self.d2 / self.a2)) if self.a2 else None

    @property
    def cosine(self) -> float | None:
        """Cosine between a and b as vectors; None where one of them is all zero."""
        if not self.a2 or not self.b2:
            return None
        return min(1.0, float(self.ab / np.sqrt(self.a2) / np.sqrt(self.b2)))

    def __add__(self, other: Difference) -> Difference:
        exponent = max((x.exponent for x in (self, other) if x.a2 or x.b2), default=0)
        d2, a2, b2, ab = np.add(self._sums(exponent), other._sums(exponent)).tolist()
        return Difference(
            size=self.size + other.size,
            same_bytes=self.same_bytes and other.same_bytes,
            unequal=self.unequal + other.unequal,
            not_finite=self.not_finite + other.not_finite,
            max_abs=max(self.max_abs, other.max_abs),
            d2=d2,
            a2=a2,
            b2=b2,
            ab=ab,
            d_range=_joined(self.d_range, other.d_range),
            b_range=_joined(self.b_range, other.b_range),
            exponent=exponent,
        )

    def _sums(self, exponent: int) -> Array:
        """The sums of squares and products, divided by ``4 ** exponent`` instead."""
        return np.ldexp([self.d2, self.a2, self.b2, self.ab], 2 * (self.exponent - exponent))

    def json(self) -> dict[str, Any]:
        """The numbers that people compare by."""
        return {
            "same_bytes": self.same_bytes,
            "unequal": self.unequal,
            "size": self.size,
            "max_abs": self.max_abs,
            "relative_frobenius": self.relative,
            "cosine": self.cosine,
            "not_finite": self.not_finite,
        }


def compare(a: Tensor, b: Tensor) -> Difference:
    """Compare two tensors of one shape, each read once; memory is bounded by blocks."""
    return sum((_of_block(x, y) for x, y in paired_blocks(a, b)), Difference())


def paired_blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Array, Array]]:
    """The blocks of two tensors of one shape, side by side."""
    assert a.shape == b.shape
    for box in _boxes(a):
        yield a.read(box), b.read(box)


def _boxes(tensor: Tensor) -> Iterator[Box]:
    return blocks(tensor, BLOCK_BYTES)


def _of_block(x: Array, y: Array) -> Difference:
    raw = y.astype(np.float64)
    a, b = _finite(x.astype(np.float64)), _finite(raw)
    exponent = _exponent(a, b)
    scaled_a, scaled_b = (np.ldexp(v, -exponent) if exponent else v for v in (a, b))
    sums: dict[str, Any] = {
        "size": x.size,
        "a2": float(np.vdot(scaled_a, scaled_a)),
        "b2": float(np.vdot(scaled_b, scaled_b)),
        "ab": float(np.vdot(scaled_a, scaled_b)),
        "b_range": _range(raw),
        "exponent": exponent,
    }
    if x.dtype == y.dtype and x.tobytes() == y.tobytes():
        return Difference(**sums, d_range=(0.0, 0.0))
    with np.errstate(invalid="ignore"):
        equal = (x == y) | (np.isnan(x) & np.isnan(y))
    strange = ~equal & ~(np.isfinite(x) & np.isfinite(y))
    d = _exact_difference(x, y) if _whole(x, y) else scaled_b - scaled_a
    d = np.where(equal | strange, 0.0, d)
    with np.errstate(over="ignore"):  # the two may be as far apart as float64 reaches, and further
        d_range = _range(np.ldexp(d, exponent) if exponent else d)
    return Difference(
        **sums,
        same_bytes=False,
        unequal=int(x.size - np.count_nonzero(equal)),
        not_finite=int(np.count_nonzero(strange)),
        max_abs=max(map(abs, d_range)),
        d2=float(np.vdot(d, d)),
        d_range=d_range,
    )


def _exponent(a: Array, b: Array) -> int:
    """By which power of two to divide, so that float64 holds squares; 0 unless it must be."""
    most = max(abs(end) for values in (a, b) for end in _range(values))
    return int(np.frexp(most)[1]) if most and not _LEAST < most < _MOST else 0


def _range(values: Array) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _whole(x: Array, y: Array) -> bool:
    return all(np.issubdtype(one.dtype, np.integer) for one in (x, y))


def _exact_difference(x: Array, y: Array) -> Array:
    """``y - x`` of integers, rounded once: float64 does not tell neighbours beyond 2^53 apart."""
    # modulo 2^64 the smaller from the larger is right, whatever their signs
    size = np.where(y > x, y.astype(np.uint64) - x.astype(np.uint64), 0)
    other = np.where(y < x, x.astype(np.uint64) - y.astype(np.uint64), 0)
    return np.asarray(size.astype(np.float64) - other.astype(np.float64))


def _finite(wide: Array) -> Array:
    """What is not finite as zero."""
    finite = np.isfinite(wide)
    return wide if finite.all() else np.where(finite, wide, 0.0)


def _joined(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return float(np.minimum(one[0], other[0])), float(np.maximum(one[1], other[1]))
