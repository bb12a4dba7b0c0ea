"""A merge computed again in float64, and how far float32 arithmetic may be from it.

docs/numerics.md: deltas are summed in float32 in whatever order a library likes, and the sum is
rounded once. So there is no one right value, but a narrow interval: with ``v = w + s A.B`` in
float64 and unit roundoff ``u = 2^-24``, every order of float32 sums lies within

    e = (r + 5) u s |A|.|B| + u (|v| + ...)

of it (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), and rounding is
monotone: a weight is right if it lies between the rounded ends.
"""

from __future__ import annotations

import numpy as np

from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.model import Parameter
from gemma_convert.convert.tensor import Array, Box, Tensor
from gemma_convert.surgery.adapter import Pair

_U = 2.0**-24
_TINY = 2.0**-140
"""What underflow in float32 can lose in a sum."""


class Product(Tensor):
    """``scale * A.B`` in float64, in the axis order of the weight.

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
        self.scale = scale
        self.shape = pattern.shape(parameter.sizes)
        self.dtype = np.dtype(np.float64)

    def read(self, box: Box) -> Array:
        ranges = dict(zip(self.axes, box, strict=True))
        rank = (0, self.pair.rank)
        a = self._factor(self.pair.a, (*(ranges[x] for x in self.inputs), rank))
        b = self._factor(self.pair.b, (rank, *(ranges[x] for x in self.outputs)))
        letters = {axis: chr(ord("a") + i) for i, axis in enumerate(self.axes)}
        left, right, out = (
            "".join(letters[x] for x in axes) for axes in (self.inputs, self.outputs, self.axes)
        )
        found: Array = np.einsum(f"{left}z,z{right}->{out}", a, b, optimize=True) * self.scale
        return found

    def _factor(self, tensor: Tensor, box: Box) -> Array:
        return tensor.read(box).astype(np.float64)


class ErrorBound(Product):
    """How far ``scale * A.B`` in float32 may be from `Product`: (r + 5) u scale |A|.|B|."""

    def __init__(self, parameter: Parameter, layout: Layout, pair: Pair, scale: float) -> None:
        super().__init__(parameter, layout, pair, scale * (pair.rank + 5) * _U)

    def _factor(self, tensor: Tensor, box: Box) -> Array:
        return np.abs(super()._factor(tensor, box))


def interval(weight: Array, delta: Array, bound: Array) -> tuple[Array, Array, Array]:
    """The sum in float64, and the ends between which float32 arithmetic must come out."""
    exact = weight.astype(np.float64) + delta
    error = bound + _U * (np.abs(exact) + bound) + _TINY
    return exact, exact - error, exact + error
