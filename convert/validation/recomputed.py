"""One merged tensor against float64: how many weights are wrong, and what that looks like."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array, Box, Tensor, ancestry
from gemma_convert.convert.validation.exact import UNIT, interval
from gemma_convert.convert.values import Revalued
from gemma_convert.surgery.adapters.adapter import Adapter

_NEAR = 0.03
"""A scale this near to a known mistake's is taken for it: the change was rounded."""

_ALIKE = 0.9
"""Cosine above which a change is one of the deltas, multiplied by something."""

_MAPPED = 3
"""Roundings of a delta that float32 multiplies by a layout's own scale, and their product."""


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to one tensor.

    Attributes:
        adapter: The adapter.
        exact: In float64.
        bound: How far float32 may be from it.
    """

    adapter: Adapter
    exact: Tensor
    bound: Tensor

    @property
    def is_mapped(self) -> bool:
        """Whether it is multiplied by a scale that the layout stores its weights with."""
        return any(isinstance(step, Revalued) for step in ancestry(self.exact))


class Recomputed:
    """One merged tensor against float64, added up over blocks.

    Args:
        deltas: What is added to it.

    Attributes:
        checked: Weights compared.
        wrong: Weights that no order of float32 sums gives.
        changed: Weights that differ from the base's in the stored dtype.
        undecided: Weights next to a rounding boundary, where two values are right.
        first: Index, expected and found value of the first wrong weight.
        along: Sum of (realised change times delta), for each delta.
        gram: Sums of the products of the deltas with each other.
        change2: Sum of the realised change squared.
        error2: Sum of (realised change - all deltas) squared.
        twice_rounded: Weights that deltas rounded before the sum give.
    """

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self.deltas = deltas
        self.checked = self.changed = self.wrong = self.undecided = self.twice_rounded = 0
        self.first: tuple[list[int], float, float] | None = None
        self.along = np.zeros(len(deltas))
        self.gram = np.zeros((len(deltas), len(deltas)))
        self.change2 = self.error2 = 0.0

    @property
    def delta2(self) -> float:
        """Sum of the squares of all deltas together."""
        return float(self.gram.sum())

    @property
    def scale(self) -> float | None:
        """What the deltas together were multiplied by; 1 is right."""
        return float(self.along.sum()) / self.delta2 if self.delta2 else None

    def json(self) -> dict[str, Any]:
        """For machines."""
        lost = self.error2 / self.delta2 if self.delta2 else 0.0
        return {
            "checked": self.checked,
            "wrong": self.wrong,
            "undecided": self.undecided,
            "scale": self.scale,
            "relative_error": float(np.sqrt(lost)),
        }

    def describe(self, dtype: str) -> str:
        """What is wrong, in words."""
        assert self.first is not None
        index, expected, value = self.first
        text = (
            f"{self.wrong} of {self.checked} weights are not the rounded sum; "
            f"at {index} expected {expected:.8g} before rounding, found {value:.8g}"
        )
        cause = self._cause(dtype)
        return f"{text}: {cause}" if cause else text

    def _cause(self, dtype: str) -> str:
        """What the realised change says about the mistake; empty if nothing fits."""
        if self.twice_rounded > 0.999 * self.checked:
            return f"the delta was rounded to {dtype} before it was added"
        if not self.delta2:
            return ""
        if not np.isfinite(self.change2):
            return "some are NaN or infinite"
        if not self.change2:
            return "the adapter was not applied" if len(self.deltas) == 1 else "none was applied"
        return self._of_one() if len(self.deltas) == 1 else self._of_several()

    def _of_one(self) -> str:
        scale, adapter = float(self.along[0]) / self.delta2, self.deltas[0].adapter
        if abs(self.along[0]) < _ALIKE * np.sqrt(self.delta2 * self.change2):
            return "what was added is not this pair's A.B"
        likely = [text for factor, text in _mistakes(adapter) if abs(scale / factor - 1) < _NEAR]
        if abs(scale - 1) < _NEAR and not likely:
            return f"as a whole what was added is {_formula(adapter)}, but not in each weight"
        told = f"what was added is {scale:.4g} times {_formula(adapter)}"
        return f"{told}: {', or '.join(likely)}" if likely else told

    def _of_several(self) -> str:
        """What each delta was multiplied by, as least squares have it."""
        scales = np.linalg.lstsq(self.gram, self.along, rcond=None)[0]
        if scales @ self.along < _ALIKE**2 * self.change2:
            return "what was added is no sum of these adapters' A.B"
        if np.all(np.abs(scales - 1) < _NEAR):
            return "as a whole what was added is what the adapters add, but not in each weight"
        parts = (
            f"{scale:.3g} times what {delta.adapter.source} adds with weight "
            f"{delta.adapter.weight:g}"
            for scale, delta in zip(scales, self.deltas, strict=True)
        )
        return f"what was added is {' and '.join(parts)}"

    def add(self, box: Box, stored: Array, weight: Array) -> None:
        """Take in the block ``box``: what is stored there, and the base's values."""
        parts = [delta.exact.read(box) for delta in self.deltas]
        bounds = [delta.bound.read(box) for delta in self.deltas]
        delta: Array = sum(parts[1:], parts[0])
        exact, low, high = interval(
            weight, delta, sum(bounds[1:], bounds[0]), self._others(parts, bounds)
        )
        with np.errstate(over="ignore"):
            least, most = low.astype(stored.dtype), high.astype(stored.dtype)
        wrong = ~((least <= stored) & (stored <= most))
        self.checked += stored.size
        self.changed += int(np.count_nonzero(stored != weight.astype(stored.dtype)))
        self.undecided += int(np.count_nonzero(least != most))
        self.wrong += int(np.count_nonzero(wrong))
        if wrong.any() and self.first is None:
            at = np.unravel_index(int(wrong.argmax()), wrong.shape)
            index = [int(i) + start for i, (start, _) in zip(at, box, strict=True)]
            self.first = (index, float(exact[at]), float(stored[at]))
        change = stored.astype(np.float64) - weight.astype(np.float64)
        flat = np.stack([part.reshape(-1) for part in parts])
        self.along += flat @ change.reshape(-1)
        self.gram += flat @ flat.T
        self.change2 += float(np.vdot(change, change))
        self.error2 += float(np.vdot(change - delta, change - delta))
        early = weight.astype(np.float32) + delta.astype(stored.dtype).astype(np.float32)
        self.twice_rounded += int(np.count_nonzero(early.astype(stored.dtype) == stored))

    def _others(self, parts: Sequence[Array], bounds: Sequence[Array]) -> Array | float:
        """What adding the deltas up, and a layout's own scale, may cost in float32."""
        cost: Array | float = 0.0
        for delta, part, bound in zip(self.deltas, parts, bounds, strict=True):
            roundings = len(parts) - 1 + (_MAPPED if delta.is_mapped else 0)
            if roundings:
                cost = cost + roundings * UNIT * (np.abs(part) + bound)
        return cost


def recompute(
    tensor: Tensor, weight: Tensor, deltas: Sequence[Delta], boxes: Iterable[Box]
) -> Recomputed:
    """Compare blocks of a merged tensor with float64.

    Args:
        tensor: What is stored.
        weight: The base's.
        deltas: What is added to it.
        boxes: The blocks.
    """
    found = Recomputed(deltas)
    for box in boxes:
        found.add(box, tensor.read(box), weight.read(box))
    return found


def _formula(adapter: Adapter) -> str:
    plain = adapter.kind == "Qwix LoRA" and adapter.weight == 1
    return "alpha / r A.B" if plain else "what the adapter adds"


def _mistakes(adapter: Adapter) -> list[tuple[float, str]]:
    """What known mistakes multiply a delta by."""
    known = [(2.0, "the adapter was applied twice"), (-1.0, "the adapter was subtracted")]
    if adapter.weight != 1:
        known.append((1 / adapter.weight, "its weight was left out"))
    for rank in adapter.ranks:
        known += [
            (1 / rank, "it was scaled by alpha / r^2"),
            (rank**0.5, "it was scaled by alpha / sqrt(r)"),
            (float(rank), "it was scaled by alpha"),
        ]
    return known
