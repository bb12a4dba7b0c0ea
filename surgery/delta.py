"""The lazy tensors of a merge: what a LoRA pair adds, a weight with its deltas added, what is lost.

The law (Qwix 0.1.8, checked against its forward pass): ``W' = W + (alpha / r) * A.B`` in the
weight's own axis order, where A holds the contracted axes and then r, B holds r and then the
others. Deltas are summed in float32 and the sum is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import einops
import numpy as np

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.tensor import Array, Box, Tensor, extent, rounded
from gemma_convert.surgery.adapter import Pair


@dataclass(frozen=True)
class Survival:
    """How much of a delta the rounding to the output dtype left, added up over blocks.

    Attributes:
        delta: Sum of squares of the delta.
        error: Sum of squares of (realised change - delta).
        changed: Number of weights whose stored value changed.
        size: Number of weights.
    """

    delta: float = 0.0
    error: float = 0.0
    changed: int = 0
    size: int = 0

    def __add__(self, other: Survival) -> Survival:
        return Survival(
            self.delta + other.delta,
            self.error + other.error,
            self.changed + other.changed,
            self.size + other.size,
        )

    @property
    def relative_error(self) -> float:
        """Relative error of the realised delta: 0 is exact, 1 is as bad as no change at all."""
        return float(np.sqrt(self.error / self.delta)) if self.delta else 0.0


class LowRank(Tensor):
    """The delta of one pair, ``scale * A.B``, in the axis order of the weight; float32.

    Args:
        parameter: Which parameter it changes.
        layout: The layout whose axis order the factors follow.
        pair: The factors.
        scale: What the product is multiplied by.
    """

    def __init__(self, parameter: Parameter, layout: Layout, pair: Pair, scale: float) -> None:
        pattern = parameter.row.cell(layout).pattern
        self.axes = pattern.axes
        self.inputs, self.outputs = parameter.row.factor_axes(layout)
        self.pair = pair
        self.scale = np.float32(scale)
        self.shape = pattern.shape(parameter.sizes)
        self.dtype = np.dtype(np.float32)

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.pair.a, self.pair.b)

    def read(self, box: Box) -> Array:
        ranges = dict(zip(self.axes, box, strict=True))
        sizes = dict(zip(self.axes, extent(box), strict=True))
        rank = (0, self.pair.rank)
        a = self.pair.a.read((*(ranges[axis] for axis in self.inputs), rank)).astype(np.float32)
        b = self.pair.b.read((rank, *(ranges[axis] for axis in self.outputs))).astype(np.float32)
        # Outputs first, as Hugging Face stores its matrices: a delta on its way there is then
        # contiguous, and adding it does not stride through memory.
        with np.errstate(over="ignore", invalid="ignore"):  # `Merged` refuses what is not finite
            product = b.reshape(self.pair.rank, -1).T @ a.reshape(-1, self.pair.rank).T
            product *= self.scale
        text = f"({' '.join(self.outputs)}) ({' '.join(self.inputs)}) -> {' '.join(self.axes)}"
        delta: Array = einops.rearrange(product, text, **sizes)
        return delta


class Merged(Tensor):
    """A weight plus the sum of its deltas, added in float32 and rounded once to ``dtype``.

    What each block read lost to the rounding is kept; `survival` adds it up.
    """

    action = "merged"

    def __init__(self, weight: Tensor, deltas: tuple[Tensor, ...], dtype: np.dtype[Any]) -> None:
        self.weight = weight
        self.deltas = deltas
        self.shape = weight.shape
        self.dtype = dtype
        self._seen: dict[Box, Survival] = {}

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.weight, *self.deltas)

    @property
    def survival(self) -> Survival:
        """What the rounding left of the delta in all blocks read so far."""
        return sum(self._seen.values(), Survival())

    def read(self, box: Box) -> Array:
        weight = self.weight.read(box)
        # float64 stays float64; everything narrower is added in float32
        wide = weight.astype(np.float64 if weight.dtype == np.float64 else np.float32)
        delta = self.deltas[0].read(box)
        for other in self.deltas[1:]:
            delta = delta + other.read(box)
        with np.errstate(over="ignore", invalid="ignore"):
            total = wide + delta
        if not np.isfinite(total).all():
            bad = int(total.size - np.isfinite(total).sum())
            raise OutputError(
                f"{bad} merged values are NaN or infinite",
                "is alpha right, and are the base's own values finite?",
            )
        merged = rounded(total, self.dtype)
        self._seen[box] = _survival(wide, delta, merged)
        return merged


def _survival(wide: Array, delta: Array, merged: Array) -> Survival:
    # A weight that only the cast to a narrower dtype moved was not changed by the delta.
    changed = int(np.count_nonzero(merged != wide.astype(merged.dtype)))
    realised = merged.astype(wide.dtype) - wide
    realised -= delta
    return Survival(
        delta=_squares(delta),
        error=_squares(realised),
        changed=changed,
        size=merged.size,
    )


def _squares(values: Array) -> float:
    """The sum of the squares, in float64 where the values' own type may not hold it."""
    with np.errstate(over="ignore", under="ignore"):
        total = float(np.vdot(values, values))
    if 1e-30 < total < np.inf:
        return total
    wide = values.astype(np.float64)
    return float(np.vdot(wide, wide))
