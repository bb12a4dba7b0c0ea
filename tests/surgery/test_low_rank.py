"""Singular value decompositions against LAPACK's of the whole matrix, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from gemma_convert.surgery import low_rank
from gemma_convert.surgery.low_rank import (
    leading_svd,
    product_svd,
    relative_error,
    whole_svd,
)

RANDOM = np.random.default_rng(3)
B, A = RANDOM.standard_normal((11, 3)), RANDOM.standard_normal((3, 7))


def test_a_product_is_decomposed_by_its_factors() -> None:
    expected = np.linalg.svd(B @ A)[1]
    found = product_svd(B, A)
    assert np.allclose(found.s, expected[:3], rtol=1e-12, atol=0)
    assert np.isclose(found.energy, np.square(expected).sum(), rtol=1e-12, atol=0)
    a, b = found.factors(3)
    assert np.allclose(b @ a, B @ A, rtol=0, atol=1e-13)


def test_truncation_is_the_best_of_its_rank_and_balanced() -> None:
    """Eckart and Young: what is lost are the singular values left out."""
    values = np.linalg.svd(B @ A)[1]
    found = whole_svd(B @ A)
    a, b = found.factors(2)
    lost = np.sqrt(np.square(values[2:]).sum() / np.square(values).sum())
    assert np.isclose(relative_error(B @ A, a, b), lost, rtol=1e-10, atol=0)
    assert np.isclose(found.kept(2), 1 - lost**2, rtol=1e-12, atol=0)
    for gram in (a @ a.T, b.T @ b):
        assert np.allclose(gram, np.diag(values[:2]), rtol=0, atol=1e-12)


def test_a_rank_beyond_the_matrix_is_filled_with_zeros() -> None:
    a, b = product_svd(B, A).factors(5)
    assert (a.shape, b.shape) == ((5, 7), (11, 5))
    assert not a[3:].any()
    assert not b[:, 3:].any()
    assert np.allclose(b @ a, B @ A, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("share", "rank"), [(0.5, 1), (0.89, 2), (0.91, 3), (0.99, 3), (1.0, 4)])
def test_rank_by_energy(share: float, rank: int) -> None:
    values = np.sqrt([6.0, 3.0, 0.95, 0.05])
    assert whole_svd(np.diag(values)).rank_for(share) == rank


def test_too_few_singular_values_give_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "EXACT_SIZE", 5)
    matrix = np.random.default_rng(2).standard_normal((53, 41))
    found = leading_svd(matrix, 3)
    assert len(found.s) == 3
    assert found.rank_for(0.9) is None
    assert np.isclose(found.energy, np.square(matrix).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(97, 61), (61, 97)])
def test_the_iteration_finds_the_leading_values(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 5 above noise of a hundredth of its norm, float32: within float32's own error."""
    monkeypatch.setattr(low_rank, "EXACT_SIZE", 5)
    random = np.random.default_rng(1)
    matrix = random.standard_normal((shape[0], 5)) @ random.standard_normal((5, shape[1]))
    matrix = (matrix + 0.01 * random.standard_normal(shape)).astype(np.float32)
    found, expected = leading_svd(matrix, 5), whole_svd(matrix)
    assert len(found.s) == 5 < len(expected.s)
    assert np.allclose(found.s, expected.s[:5], rtol=1e-6, atol=0)
    errors = [relative_error(matrix, *svd.factors(5)) for svd in (found, expected)]
    assert np.isclose(*errors, rtol=1e-5, atol=0)
    assert np.array_equal(found.s, leading_svd(matrix, 5).s)


def test_inside_the_noise_the_iteration_is_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 above noise, 12 asked for: the module's docstring has these numbers."""
    monkeypatch.setattr(low_rank, "EXACT_SIZE", 5)
    random = np.random.default_rng(1)
    matrix = random.standard_normal((211, 3)) @ random.standard_normal((3, 103))
    matrix = (matrix + 0.01 * random.standard_normal((211, 103))).astype(np.float32)
    found, expected = leading_svd(matrix, 12), whole_svd(matrix)
    assert np.allclose(found.s[:3], expected.s[:3], rtol=1e-7, atol=0)
    ratios = found.s / expected.s[:12]
    assert 0.94 < ratios.min() < 0.9999
    best, own = (relative_error(matrix, *svd.factors(12)) for svd in (expected, found))
    assert best < own < 1.01 * best


def test_the_zero_matrix_keeps_everything() -> None:
    found = product_svd(np.zeros((4, 2)), A[:2])
    assert found.kept(1) == 1
    assert found.rank_for(0.99) == 1
    assert not np.any(found.factors(1)[1] @ found.factors(1)[0])
