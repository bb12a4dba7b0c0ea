"""The rank of a difference that is too large for memory, and whether it looks like a LoRA.

A randomised range finder (Halko, Martinsson, Tropp 2011, algorithm 4.4) reads the difference by
blocks of rows. What the basis leaves out is known exactly, since it is orthonormal:
``|D - Q Q'D|^2 = |D|^2 - |Q'D|^2``.

A tuned model is stored rounded. Rounding to nearest moves a weight w by at most half a unit in
the last place (ulp), as noise of variance ``ulp(w)^2 / 12``. A random matrix with such entries has
a spectral norm near the largest norm of a row of deviations plus the largest of a column (Bandeira
and van Handel 2016, theorem 1.1). Singular values above that are the change; D looks like a LoRA
if what is left of it is no more than rounding can make.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.stack import Slice
from gemma_convert.convert.tensor import Array, Tensor, blocks
from gemma_convert.convert.validation.difference import BLOCK_BYTES

PROBES = 72
"""Singular values that are looked for."""

_PASSES = 2
"""Power iterations: they sharpen singular values that lie close together."""

_MOST = 1e18
"""Frobenius norm of a difference whose products of two values float32 can hold."""

_MARGIN = 3**0.5
"""By how much a singular value must exceed that: an error of half a ulp, the most there is, is
this many times the deviation of one spread evenly."""


@dataclass(frozen=True)
class Rank:
    """What a difference D (rows, columns) looks like.

    Attributes:
        rank: Number of singular values above the rounding noise; None if more than were sought.
        stable_rank: ``|D|_F^2 / |D|_2^2``: how many directions carry the change.
        explained: Whether the rest is no more than the rounding of the stored values can make.
        is_low_rank: Whether that is so for a rank of at most half the smaller side.
        singular_values: The largest ones.
        noise: Spectral norm that the rounding alone would have.
        rest: Frobenius norm of D without those, over that of D.
    """

    rank: int | None
    stable_rank: float
    explained: bool
    is_low_rank: bool
    singular_values: tuple[float, ...]
    noise: float
    rest: float

    def json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "rank": self.rank,
            "stable_rank": self.stable_rank,
            "is_low_rank": self.is_low_rank,
            "singular_values": list(self.singular_values[:16]),
            "noise": self.noise,
            "rest": self.rest,
        }


def difference_rank(a: Tensor, b: Tensor, probes: int = PROBES, seed: int = 0) -> Rank | None:
    """The rank of ``b - a`` taken as a matrix: the last axis by all others.

    Args:
        a: The base's tensor.
        b: The tuned one's.
        probes: Singular values to look for.
        seed: Of the random probes.

    Returns:
        None for a tensor that is no matrix of floating-point numbers, one too small for its rank to
        mean something, and where values are not finite, or too large or small for float32.
    """
    if not (dtypes.is_float(a.dtype) and dtypes.is_float(b.dtype)):
        return None
    rows, columns = prod(a.shape[:-1]), a.shape[-1] if a.shape else 0
    k = min(probes, rows, columns)
    if len(a.shape) < 2 or k < 4:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        total, noise, worst = _norms(a, b)
    if not 0 < total < _MOST**2:
        return None
    basis = np.random.default_rng(seed).standard_normal((columns, k), np.float32)
    for _ in range(_PASSES):
        basis = np.linalg.qr(_transposed_times(a, b, np.linalg.qr(_times(a, b, basis))[0]))[0]
    left = np.linalg.qr(_times(a, b, basis))[0]
    singular = np.linalg.svd(_transposed_times(a, b, left), compute_uv=False).astype(np.float64)
    if not singular[0]:
        return None
    # a singular value that float32 arithmetic cannot tell from zero is none
    floor = max(_MARGIN * noise, 1e-5 * float(singular[0]))
    count = int(np.count_nonzero(singular > floor))
    rest = max(0.0, total - float(np.sum(singular[:count] ** 2)))
    found_all = count < k or k == min(rows, columns)
    explained = found_all and rest <= worst + 1e-6 * total
    return Rank(
        rank=count if found_all else None,
        stable_rank=total / float(singular[0]) ** 2,
        explained=explained,
        is_low_rank=explained and 2 * count <= min(rows, columns),
        singular_values=tuple(float(s) for s in singular),
        noise=noise,
        rest=float(np.sqrt(rest / total)),
    )


@dataclass(frozen=True)
class Ranks:
    """The ranks of the matrices that one tensor holds, such as one for each expert.

    Attributes:
        matrices: One for each matrix whose difference has a rank; not the unchanged ones.
        count: How many matrices there are.
    """

    matrices: tuple[Rank, ...]
    count: int

    @property
    def is_low_rank(self) -> bool:
        """Whether all that changed look like a LoRA."""
        return all(rank.is_low_rank for rank in self.matrices)

    @property
    def rank(self) -> int | None:
        """The largest; None if one has more than were sought."""
        found = [rank.rank for rank in self.matrices]
        known = [rank for rank in found if rank is not None]
        return max(known) if len(known) == len(found) else None

    def json(self) -> dict[str, Any]:
        """For machines: each matrix on its own, where there are several."""
        if self.count == 1:
            return self.matrices[0].json()
        return {"matrices": self.count, "changed": [rank.json() for rank in self.matrices]}


def difference_ranks(a: Tensor, b: Tensor, probes: int = PROBES) -> Ranks | None:
    """The ranks of ``b - a``: of a matrix, or of each along the first axis of three.

    Args:
        a: The base's tensor, (rows, columns) or (experts, rows, columns).
        b: The tuned one's.
        probes: Singular values to look for in each.

    Returns:
        None for tensors of other shapes and where `difference_rank` has none.
    """
    if len(a.shape) not in (2, 3):
        return None
    if len(a.shape) == 2:
        sides = [(a, b)]
    else:
        sides = [(Slice(a, 0, (i,)), Slice(b, 0, (i,))) for i in range(a.shape[0])]
    found = [difference_rank(x, y, probes) for x, y in sides]
    known = tuple(rank for rank in found if rank is not None)
    return Ranks(known, len(sides)) if known else None


def ulp(values: Array, dtype: np.dtype[Any]) -> Array:
    """The unit in the last place of ``values`` in ``dtype``, as float64."""
    kind: Any = ml_dtypes.finfo(dtype)
    fraction, exponent = np.frexp(values.astype(np.float64))
    least = kind.minexp + 1  # frexp's fraction is below one, IEEE's below two
    exponent[fraction == 0] = least
    return np.asarray(np.ldexp(1.0, np.maximum(exponent, least) - 1 - int(kind.nmant)))


def _norms(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """D's Frobenius norm squared, the rounding's spectral norm, its largest Frobenius norm squared.

    The first is a sum over all values, the last what they would make if each were half a ulp.
    """
    total = half_ulps = widest_row = 0.0
    columns = np.zeros(a.shape[-1])
    for _, x, y in _rows(a, b):
        d = y.astype(np.float64) - x.astype(np.float64)
        total += float(np.vdot(d, d))
        variance = ulp(y, b.dtype) ** 2 / 12
        half_ulps += 3 * float(variance.sum())
        widest_row = max(widest_row, float(variance.sum(1).max()))
        columns += variance.sum(0)
    return total, float(np.sqrt(widest_row) + np.sqrt(columns.max())), half_ulps


def _times(a: Tensor, b: Tensor, right: Array) -> Array:
    """D right, (rows, k)."""
    return np.concatenate([_d(x, y) @ right for _, x, y in _rows(a, b)])


def _transposed_times(a: Tensor, b: Tensor, left: Array) -> Array:
    """D' left, (columns, k)."""
    out = np.zeros((a.shape[-1], left.shape[1]), np.float64)
    for start, x, y in _rows(a, b):
        out += _d(x, y).T @ left[start : start + len(x)]
    return out.astype(np.float32)


def _d(x: Array, y: Array) -> Array:
    return (y.astype(np.float64) - x.astype(np.float64)).astype(np.float32)


def _rows(a: Tensor, b: Tensor) -> Iterator[tuple[int, Array, Array]]:
    """Blocks of rows of both as matrices, each with the index of its first row."""
    start = 0
    for box in blocks(a, BLOCK_BYTES):
        x, y = (t.read(box).reshape(-1, a.shape[-1]) for t in (a, b))
        yield start, x, y
        start += len(x)
