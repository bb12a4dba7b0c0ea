"""The rank of a difference: known changes in, their rank out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.tensor import Array, ArrayTensor
from gemma_convert.convert.validation import rank as ranks
from gemma_convert.convert.validation.rank import Rank, difference_rank, difference_ranks, ulp

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
RANDOM = np.random.default_rng(3)
SHAPE = (94, 61)


def base() -> Array:
    """A weight with rows of very different sizes, as real ones have."""
    return RANDOM.normal(0.0, 0.05, SHAPE) * RANDOM.lognormal(0.0, 1.0, (SHAPE[0], 1))


def low_rank(rank: int) -> Array:
    return RANDOM.normal(0.0, 0.1, (SHAPE[0], rank)) @ RANDOM.normal(0.0, 0.1, (rank, SHAPE[1]))


def found(weight: Array, change: Array, dtype: np.dtype[np.generic], probes: int = 20) -> Rank:
    stored = weight.astype(dtype)
    tuned = (stored.astype(np.float64) + change).astype(dtype)
    result = difference_rank(ArrayTensor(stored), ArrayTensor(tuned), probes)
    assert result is not None
    return result


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("block", [512, 1 << 20])
def test_the_rank_of_a_lora_is_found(
    rank: int, dtype: np.dtype[np.generic], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "BLOCK_BYTES", block)
    result = found(base(), low_rank(rank), dtype)
    assert (result.rank, result.is_low_rank) == (rank, True)


def test_singular_values_are_those_of_numpy() -> None:
    weight, change = base().astype(F32), low_rank(5)
    tuned = (weight + change).astype(F32)
    result = difference_rank(ArrayTensor(weight), ArrayTensor(tuned), 20)
    assert result is not None
    exact = np.linalg.svd(tuned.astype(np.float64) - weight, compute_uv=False)
    # the products are float32's
    np.testing.assert_allclose(result.singular_values[:5], exact[:5], rtol=1e-5)
    assert result.stable_rank == pytest.approx((exact**2).sum() / exact[0] ** 2, rel=1e-5)


def test_full_fine_tuning_is_no_lora() -> None:
    result = found(base(), RANDOM.normal(0.0, 0.1, SHAPE), F32)
    assert (result.rank, result.is_low_rank) == (None, False)


def test_a_lora_and_something_else_is_no_lora() -> None:
    change = low_rank(2)
    change[7] += RANDOM.normal(0.0, 0.3, SHAPE[1])  # one more direction, which is rank 3
    change += RANDOM.normal(0.0, 0.004, SHAPE)  # and a little of everything
    result = found(base(), change, F32)
    assert not result.is_low_rank


def test_rounding_alone_has_rank_zero() -> None:
    weight = base()
    rounded = weight.astype(BF16)
    result = difference_rank(ArrayTensor(weight.astype(F32)), ArrayTensor(rounded), 20)
    assert result is not None
    assert (result.rank, result.is_low_rank) == (0, True)


def test_no_rank_of_what_is_no_matrix_or_equal() -> None:
    vector = ArrayTensor(np.ones(9, np.float32))
    assert difference_rank(vector, ArrayTensor(np.zeros(9, np.float32))) is None
    matrix = ArrayTensor(base().astype(F32))
    assert difference_rank(matrix, matrix) is None
    small = ArrayTensor(np.ones((3, 40), np.float32))
    assert difference_rank(small, ArrayTensor(np.zeros((3, 40), np.float32))) is None


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), F32, np.dtype(np.float64)])
def test_ulp_is_numpys_spacing(dtype: np.dtype[np.generic]) -> None:
    values = np.array([1.0, 1.5, -2.0, 0.3, 6e4, 1e-3, 2.0**-14, 2.0**-13, 2.0**-20, 0.0], dtype)
    np.testing.assert_array_equal(ulp(values, dtype), np.spacing(np.abs(values)))


def test_ulp_of_bfloat16() -> None:
    values = np.array([1.0, 1.98, 2.0, -0.75], BF16)
    np.testing.assert_array_equal(ulp(values, BF16), np.array([1, 1, 2, 0.5]) * 2.0**-7)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_no_rank_of_values_without_one(value: float, dtype: np.dtype[np.generic]) -> None:
    weight = base().astype(dtype)
    broken = (-weight.astype(F32)).astype(dtype)
    broken[5, 7] = value
    assert difference_rank(ArrayTensor(weight), ArrayTensor(broken)) is None


def test_no_rank_of_integers() -> None:
    codes = RANDOM.integers(-127, 127, SHAPE, np.int8)
    assert difference_rank(ArrayTensor(codes), ArrayTensor(codes[::-1].copy())) is None


def test_more_than_half_of_all_directions_are_a_rank_but_no_lora() -> None:
    result = found(base(), low_rank(40), F32, probes=61)
    assert (result.rank, result.explained, result.is_low_rank) == (40, True, False)


def test_each_expert_has_a_rank_of_its_own() -> None:
    """Together, as one matrix of all rows, they would have the sum of the ranks."""
    weight = np.stack([base() for _ in range(5)]).astype(F32)
    change = np.stack([low_rank(rank) for rank in (3, 3, 1, 3, 3)]).astype(F32)
    change[4] = 0
    result = difference_ranks(ArrayTensor(weight), ArrayTensor(weight + change), 20)
    assert result is not None
    assert [rank.rank for rank in result.matrices] == [3, 3, 1, 3]  # the last is unchanged
    assert (result.count, result.rank, result.is_low_rank) == (5, 3, True)
    assert [row["rank"] for row in result.json()["changed"]] == [3, 3, 1, 3]
    change[1] = RANDOM.normal(0.0, 0.1, SHAPE)
    broken = difference_ranks(ArrayTensor(weight), ArrayTensor(weight + change), 20)
    assert broken is not None
    assert (broken.rank, broken.is_low_rank) == (None, False)
    assert difference_ranks(ArrayTensor(weight[None]), ArrayTensor(weight[None] + 1), 20) is None


def test_a_change_that_float32_does_not_see() -> None:
    """Of float64 weights: the difference is taken before it is made narrower."""
    weight = base()
    result = found(weight, 1e-10 * low_rank(3), np.dtype(np.float64))
    assert (result.rank, result.is_low_rank) == (3, True)
    tiny = ArrayTensor(weight * 1e-60)
    assert difference_rank(tiny, ArrayTensor(weight * 1.1e-60), 20) is None
    large = ArrayTensor(weight * 1e200)
    assert difference_rank(large, ArrayTensor(weight * 1.1e200), 20) is None
