"""Sums of arrays by weight: plainly, by TIES, by DARE. Array in, array out.

TIES (Yadav et al., 2023) keeps the largest values of each array, elects a sign for each place, and
averages those that have it. DARE (Yu et al., 2024) drops values at random and scales the others up.
The arithmetic is that of PEFT 0.21.2 (``peft.utils.merge_utils``), in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemma_convert.convert.tensor import Array


def linear(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """The weighted sum."""
    total: Array = np.tensordot(np.asarray(weights), np.stack(arrays), axes=1)
    return total


def ties(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """The weighted mean, place by place, of those values that have the elected sign.

    The sign of a place is that of the plain sum there, plus where it is zero; values of zero, such
    as those trimmed before, have no vote and do not count in the mean.
    """
    stacked = np.stack(arrays)
    elected = np.where(stacked.sum(axis=0) >= 0, 1, -1)
    agreeing = np.sign(stacked) == elected
    factors = np.reshape(weights, (-1, *(1,) * (stacked.ndim - 1)))
    total = (stacked * factors * agreeing).sum(axis=0)
    mean: Array = total / np.maximum(agreeing.sum(axis=0), 1)
    return mean


def trim(array: Array, density: float) -> Array:
    """``array`` with all but the share ``density`` of its values, the largest, set to zero."""
    count = int(density * array.size)
    if count == array.size:
        return array
    order = np.argsort(-np.abs(array), axis=None, kind="stable")
    kept = np.zeros(array.size, bool)
    kept[order[:count]] = True
    return array * kept.reshape(array.shape)


def drop(array: Array, density: float, random: np.random.Generator) -> Array:
    """``array`` with each value kept by chance ``density`` and divided by it, else zero."""
    return array * (random.random(array.shape) < density) / density
