"""The lazy tensors of a merge: what a LoRA pair adds, a weight with its deltas added, what is lost.

The law (Qwix 0.1.8, checked against its forward pass): ``W' = W + (alpha / r) * A.B`` in the
weight's own axis order, where A holds the contracted axes and then r, B holds r and then the
others. Deltas are summed in float32 and the sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from threading import Lock
from typing import Any

import einops
import numpy as np

from gemma_convert.convert import pattern as patterns
from gemma_convert.convert.casting import all_finite, converted
from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.pattern import Pattern, Sizes
from gemma_convert.convert.relayout import Relaid, within
from gemma_convert.convert.repeats import Part
from gemma_convert.convert.tensor import Array, Box, Tensor, blocks, extent, rounded, whole
from gemma_convert.surgery.adapters.adapter import Pair
from gemma_convert.surgery.adapters.forms import RANK


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
        layout: The layout whose axis order the weight follows.
        pair: The factors.
        scale: What the product is multiplied by.
    """

    def __init__(self, parameter: Parameter, layout: Layout, pair: Pair, scale: float) -> None:
        row, sizes = parameter.row, {**parameter.sizes, RANK: pair.rank}
        self.pattern = row.cell(layout).pattern
        self.sizes = parameter.sizes
        self.pair = pair
        self.scale = np.float32(scale)
        self.shape = self.pattern.shape(parameter.sizes)
        self.dtype = np.dtype(np.float32)
        inputs, outputs = row.factor_axes(layout)
        a, b = pair.form.patterns(row, layout)
        # Until its 0.18, PEFT had the outputs of experts in A.
        self.sides = (outputs, inputs) if set(a.axes) >= set(outputs) else (inputs, outputs)
        self.stacked = row.stacked
        self.a = _by_axes(pair.a, a, (*self.stacked, RANK, *self.sides[0]), sizes)
        self.b = _by_axes(pair.b, b, (*self.stacked, *self.sides[1], RANK), sizes)

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return tuple(self.pair.factors().values())

    def read(self, box: Box) -> Array:
        ranges = self.pattern.ranges(box, self.sizes)
        covered = self.pattern.box(ranges, self.sizes)
        sizes = {axis: stop - start for axis, (start, stop) in ranges.items()}
        rank = (0, self.pair.rank)
        stacked = tuple(ranges[axis] for axis in self.stacked)
        a = self.a.read((*stacked, rank, *(ranges[axis] for axis in self.sides[0])))
        b = self.b.read((*stacked, *(ranges[axis] for axis in self.sides[1]), rank))
        count = prod(extent(stacked))
        # B first: its outputs come first where Hugging Face stores its matrices, so that a delta
        # on its way there is contiguous, and adding it does not stride through memory.
        with np.errstate(over="ignore", invalid="ignore"):  # `Merged` refuses what is not finite
            product = b.reshape(count, -1, self.pair.rank).astype(np.float32) @ a.reshape(
                count, self.pair.rank, -1
            ).astype(np.float32)
            product *= self.scale
        source = (
            f"({' '.join(self.stacked)}) ({' '.join(self.sides[1])}) ({' '.join(self.sides[0])})"
        )
        delta: Array = einops.rearrange(product, f"{source} -> {self.pattern.text}", **sizes)
        return delta[within(box, covered)]


class Dora(Tensor):
    """What DoRA adds: ``m * (W + D) / ||W + D|| - W``, the norm over the inputs of each output.

    The norms are computed once, a block of whole rows at a time, and kept: one number an output.

    Args:
        weight: W in the layout of the adapter, a matrix.
        delta: D, the product of the factors.
        magnitude: m, one number an output.
        inputs: The axis of the inputs, 0 or 1.
    """

    def __init__(self, weight: Tensor, delta: Tensor, magnitude: Tensor, inputs: int) -> None:
        self.weight = weight
        self.delta = delta
        self.magnitude = magnitude
        self.inputs = inputs
        self.shape = weight.shape
        self.dtype = np.dtype(np.float32)
        self._ratio: Array | None = None
        self._lock = Lock()

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.weight, self.delta, self.magnitude)

    @property
    def ratio(self) -> Array:
        """M / ||W + D||, by output."""
        with self._lock:
            if self._ratio is None:
                self._ratio = self._ratios()
            return self._ratio

    def _ratios(self) -> Array:
        squares = np.zeros(self.shape[1 - self.inputs])
        for box in blocks(self.delta):
            total = self.weight.read(box).astype(np.float32) + self.delta.read(box)
            start, stop = box[1 - self.inputs]
            squares[start:stop] += np.square(total, dtype=np.float64).sum(self.inputs)
        if not squares.all():
            raise OutputError(
                f"the norm of output {int(np.argmin(squares))} is 0, DoRA divides by it",
                "is this the base that the adapter was trained on?",
            )
        magnitude = self.magnitude.numpy().astype(np.float64)
        ratios: Array = (magnitude / np.sqrt(squares)).astype(np.float32)
        return ratios

    def read(self, box: Box) -> Array:
        start, stop = box[1 - self.inputs]
        ratio = np.expand_dims(self.ratio[start:stop], self.inputs)
        weight = self.weight.read(box).astype(np.float32)
        changed: Array = ratio * (weight + self.delta.read(box)) - weight
        return changed


class Weighted(Tensor):
    """A delta multiplied by the weight of its adapter; float32."""

    def __init__(self, delta: Tensor, weight: float) -> None:
        self.delta = delta
        self.weight = np.float32(weight)
        self.shape = delta.shape
        self.dtype = delta.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.delta,)

    def read(self, box: Box) -> Array:
        weighted: Array = self.weight * self.delta.read(box)
        return weighted


@dataclass(frozen=True)
class Arithmetic:
    """What computes deltas; validation has another one than the merge.

    Attributes:
        product: As `LowRank`.
        dora: As `Dora`; its second argument is what ``product`` made.
        weighted: As `Weighted`; its first argument is what ``dora`` made.
    """

    product: Callable[[Parameter, Layout, Pair, float], Tensor] = LowRank
    dora: Callable[[Tensor, Tensor, Tensor, int], Tensor] = Dora
    weighted: Callable[[Tensor, float], Tensor] = Weighted


FLOAT32 = Arithmetic()
"""The merge's own."""


def _by_axes(tensor: Tensor, pattern: Pattern, axes: tuple[str, ...], sizes: Sizes) -> Tensor:
    """``tensor`` with a dimension for each axis, in the order of ``axes``."""
    return Relaid([Part(tensor, {})], pattern, patterns.parse(" ".join(axes)), {}, sizes)


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
        # in order of the boxes, whichever thread was first, since sums of floats depend on it
        return sum((self._seen[box] for box in sorted(self._seen)), Survival())

    def findings(self) -> dict[str, Any]:
        """The `survival`."""
        return asdict(self.survival)

    def recall(self, findings: Mapping[str, Any]) -> None:
        """Take over the survival of an earlier run."""
        self._seen = {whole(self.shape): Survival(**findings)}

    def read(self, box: Box) -> Array:
        weight = self.weight.read(box)
        # float64 stays float64; everything narrower is added in float32
        wide = converted(weight, np.dtype("f8" if weight.dtype == np.float64 else "f4"))
        delta = self.deltas[0].read(box)
        for other in self.deltas[1:]:
            delta = delta + other.read(box)
        with np.errstate(over="ignore", invalid="ignore"):
            total = wide + delta
        if not all_finite(total):
            bad = int(total.size - np.isfinite(total).sum())
            raise OutputError(
                f"{bad} merged values are NaN or infinite",
                "is alpha right, and are the base's own values finite?",
            )
        merged = rounded(total, self.dtype)
        self._seen[box] = _survival(wide, delta, merged, same=weight.dtype == self.dtype)
        return merged


def _survival(wide: Array, delta: Array, merged: Array, *, same: bool) -> Survival:
    """What is left of ``delta``; ``same`` if the weight had the dtype of ``merged``."""
    realised = converted(merged, wide.dtype) - wide
    # A weight that only the cast to a narrower dtype moved was not changed by the delta.
    changed = realised != 0 if same else merged != converted(wide, merged.dtype)
    count = int(np.count_nonzero(changed))
    realised -= delta
    return Survival(
        delta=_squares(delta), error=_squares(realised), changed=count, size=merged.size
    )


def _squares(values: Array) -> float:
    """The sum of the squares, in float64 where the values' own type may not hold it."""
    with np.errstate(over="ignore", under="ignore"):
        total = float(np.vdot(values, values))
    if 1e-30 < total < np.inf:
        return total
    wide = values.astype(np.float64)
    return float(np.vdot(wide, wide))
