"""Matrices of low rank: singular value decompositions, of a whole matrix and of a product.

A matrix D (outputs x inputs) of low rank is ``B.A``, B (outputs x r) and A (r x inputs). Its energy
is the sum of its squares, which is the sum of the squares of its singular values; a rank is chosen
by the share of it that is kept.

Large matrices get a block power iteration (Halko, Martinsson and Tropp, SIAM Review 2011, algorithm
4.4): products of matrices and numpy's QR, at the speed of BLAS. scipy's ``svds`` (ARPACK) takes
one vector at a time and waits for every singular value, those inside the noise too: for 64 of a
21504 x 5376 matrix of rank 16 with noise it took 30 s on one core, this 3 s. Singular values that
stand out of the noise are exact to seven digits; inside a flat spectrum they come out up to 6 % too
small, so that a pair with ranks to spare is off the best one by less than 1 % of its error.
scikit-learn's ``randomized_svd`` is this algorithm, but one more dependency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array

EXACT_SIZE = 256
"""Matrices with no more rows or columns than this get LAPACK's whole decomposition in float64."""

_OVERSAMPLE = 10
"""Vectors iterated beyond those wanted; Halko et al. advise 5 to 10."""

_ITERATIONS = 4
"""Each damps the unwanted directions by the square of the gap in the spectrum."""


@dataclass(frozen=True)
class Svd:
    """Leading singular vectors of a matrix D: ``D ~ u diag(s) vt``.

    Attributes:
        u: (outputs, k), orthonormal columns.
        s: (k,), descending.
        vt: (k, inputs), orthonormal rows.
        energy: ||D||^2, of all singular values.
    """

    u: Array
    s: Array
    vt: Array
    energy: float

    def kept(self, rank: int) -> float:
        """The share of the energy that the leading ``rank`` singular values hold, 0 to 1."""
        if not self.energy:
            return 1.0
        return min(1.0, float(np.square(self.s[:rank]).sum()) / self.energy)

    def rank_for(self, share: float) -> int | None:
        """The smallest rank that keeps ``share`` of the energy; None if these are too few."""
        reached = np.cumsum(np.square(self.s)) >= share * self.energy * (1 - _ROUNDING)
        return int(np.argmax(reached)) + 1 if reached.any() else None

    def factors(self, rank: int) -> tuple[Array, Array]:
        """A (rank, inputs) and B (outputs, rank) whose product is D's best approximation.

        They are balanced: each has the square root of the singular values, so that neither is
        small where 16-bit floats are stored or training goes on. Beyond the rank of D they are 0.
        """
        root = np.sqrt(self.s[:rank])
        a, b = root[:, None] * self.vt[:rank], self.u[:, :rank] * root
        missing = rank - len(root)
        return np.pad(a, ((0, missing), (0, 0))), np.pad(b, ((0, 0), (0, missing)))


_ROUNDING = 1e-12
"""Of sums in float64, so that the whole rank keeps a share of 1."""


def whole_svd(matrix: Array) -> Svd:
    """Every singular value of ``matrix``, in float64."""
    wide = matrix.astype(np.float64)
    u, s, vt = np.linalg.svd(wide, full_matrices=False)
    return Svd(u, s, vt, energy(wide))


def leading_svd(matrix: Array, count: int, seed: int = 0) -> Svd:
    """The leading ``count`` singular values of ``matrix``; all of them where that costs no more.

    Args:
        matrix: (outputs, inputs), float32 or float64; the products are computed in its dtype.
        count: How many are wanted.
        seed: Of the vectors that the iteration starts from; the same seed gives the same bits.
    """
    width = count + _OVERSAMPLE
    if min(matrix.shape) <= max(EXACT_SIZE, 2 * width):
        return whole_svd(matrix)
    random = np.random.default_rng(seed)
    v = random.standard_normal((matrix.shape[1], width), matrix.dtype)
    for _ in range(_ITERATIONS):
        v = _orthonormal(matrix.T @ _orthonormal(matrix @ v))
    basis = _orthonormal(matrix @ v)
    inner, s, vt = np.linalg.svd((basis.T @ matrix).astype(np.float64), full_matrices=False)
    return Svd(basis @ inner[:, :count], s[:count], vt[:count], energy(matrix))


def product_svd(b: Array, a: Array) -> Svd:
    """The singular values of ``b @ a`` without forming it, in float64.

    With ``b = Qb Rb`` and ``a^T = Qa Ra``, the product is ``Qb (Rb Ra^T) Qa^T``; the core in the
    middle has the size of the rank.

    Args:
        b: (outputs, r).
        a: (r, inputs).
    """
    qb, rb = np.linalg.qr(b.astype(np.float64))
    qa, ra = np.linalg.qr(a.T.astype(np.float64))
    core = rb @ ra.T
    u, s, vt = np.linalg.svd(core, full_matrices=False)
    return Svd(qb @ u, s, vt @ qa.T, energy(core))


def energy(matrix: Array) -> float:
    """The sum of the squares, added up in float64."""
    return float(sum(np.square(row, dtype=np.float64).sum() for row in _bands(matrix)))


def relative_error(matrix: Array, a: Array, b: Array) -> float:
    """||D - B.A|| / ||D||, measured on the product itself, a band of rows at a time."""
    total, size, start = 0.0, 0.0, 0
    wide = np.result_type(matrix.dtype, np.float32)
    a, b = a.astype(wide), b.astype(wide)
    for band in _bands(matrix):
        total += float(np.square(band - b[start : start + len(band)] @ a, dtype=np.float64).sum())
        size += float(np.square(band, dtype=np.float64).sum())
        start += len(band)
    return float(np.sqrt(total / size)) if size else 0.0


def _orthonormal(matrix: Array) -> Array:
    """An orthonormal basis of the columns."""
    found: Array = np.linalg.qr(matrix)[0]
    return found


def _bands(matrix: Array, most: int = 1 << 20) -> list[Any]:
    """``matrix`` in bands of rows, of at most about ``most`` values each."""
    rows = max(1, most // max(1, matrix.shape[1]))
    return [matrix[start : start + rows] for start in range(0, len(matrix), rows)]
