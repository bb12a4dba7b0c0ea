"""A merge computed again in float64, and how far float32 arithmetic may be from it.

docs/numerics.md: deltas are summed in float32 in whatever order a library likes, and the sum is
rounded once. So there is no one right value, but a narrow interval: with ``v = w + s A.B`` in
float64 and unit roundoff ``u = 2^-24``, every order of float32 sums lies within

    e = (r + 5) u s |A|.|B| + u (|v| + ...)

of it (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), and rounding is
monotone: a weight is right if it lies between the rounded ends. Several deltas add up, and so do
their bounds. DoRA's is in `exact_dora`.

The factors are read whole, brought to one axis a letter by einops, and multiplied by einsum: the
merge itself reads boxes and multiplies matrices.
"""

from __future__ import annotations

from functools import lru_cache

import einops
import numpy as np

from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.pattern import Pattern
from gemma_convert.convert.relayout import within
from gemma_convert.convert.tensor import Array, Box, Tensor
from gemma_convert.surgery.adapters.adapter import Pair
from gemma_convert.surgery.adapters.forms import RANK

UNIT = 2.0**-24
"""The unit roundoff of float32."""

_TINY = 2.0**-140
"""What underflow in float32 can lose in a sum."""

_FACTORS_KEPT = 16
"""Factors held in memory, so that the boxes of one tensor need not read them again."""


class Product(Tensor):
    """``scale * A.B`` in float64, in the axis order of the weight.

    Args:
        parameter: Which parameter it changes.
        layout: The layout whose axis order the weight follows.
        pair: The factors, in the one form that fits.
        scale: What the product is multiplied by.
    """

    def __init__(self, parameter: Parameter, layout: Layout, pair: Pair, scale: float) -> None:
        self.pattern = parameter.row.cell(layout).pattern
        self.forms = pair.form.patterns(parameter.row, layout)
        self.sizes = {**parameter.sizes, RANK: pair.rank}
        self.pair = pair
        self.scale = scale
        self.shape = self.pattern.shape(parameter.sizes)
        self.dtype = np.dtype(np.float64)

    def read(self, box: Box) -> Array:
        ranges = self.pattern.ranges(box, self.sizes)
        slices = {axis: slice(*bounds) for axis, bounds in ranges.items()}
        letters = {axis: chr(ord("a") + i) for i, axis in enumerate((RANK, *ranges))}
        terms, sides = [], []
        for factor, form in zip((self.pair.a, self.pair.b), self.forms, strict=True):
            array = self._factor(_by_axes(factor, form, self.sizes))
            sides.append(array[tuple(slices.get(axis, slice(None)) for axis in form.axes)])
            terms.append("".join(letters[axis] for axis in form.axes))
        out = "".join(letters[axis] for axis in self.pattern.axes)
        found = np.einsum(f"{','.join(terms)}->{out}", *sides, optimize=True) * self.scale
        composed: Array = einops.rearrange(
            found, f"{' '.join(self.pattern.axes)} -> {self.pattern.text}"
        )
        return composed[within(box, self.pattern.box(ranges, self.sizes))]

    def _factor(self, values: Array) -> Array:
        return values


class ErrorBound(Product):
    """How far ``scale * A.B`` in float32 may be from `Product`: (r + 5) u scale |A|.|B|."""

    def __init__(self, parameter: Parameter, layout: Layout, pair: Pair, scale: float) -> None:
        super().__init__(parameter, layout, pair, abs(scale) * (pair.rank + 5) * UNIT)
        self.exact = Product(parameter, layout, pair, scale)

    def _factor(self, values: Array) -> Array:
        return np.abs(values)


@lru_cache(maxsize=_FACTORS_KEPT)
def _factor_values(tensor: Tensor) -> Array:
    return tensor.numpy().astype(np.float64)


def _by_axes(tensor: Tensor, form: Pattern, sizes: dict[str, int]) -> Array:
    """All of a factor, float64, with a dimension for each axis of its form, in that order."""
    known = {axis: sizes[axis] for axis in form.axes}
    values: Array = einops.rearrange(
        _factor_values(tensor), f"{form.text} -> {' '.join(form.axes)}", **known
    )
    return values


def interval(
    weight: Array, delta: Array, bound: Array, others: Array | float = 0.0
) -> tuple[Array, Array, Array]:
    """The sum in float64, and the ends between which float32 arithmetic must come out.

    Args:
        weight: The base's values.
        delta: The sum of all deltas, float64.
        bound: How far each of them may be off in float32, added up.
        others: What adding them to each other may cost in float32; nothing for a single one.
    """
    exact = weight.astype(np.float64) + delta
    known = bound + others
    error = known + UNIT * (np.abs(exact) + known) + _TINY
    return exact, exact - error, exact + error
