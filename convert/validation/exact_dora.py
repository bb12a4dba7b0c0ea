"""DoRA's deltas computed again in float64, and how far float32 arithmetic may be from them.

What DoRA adds is ``q T - W`` with ``T = W + D`` and ``q = m / |T|``, the norm over the inputs of
each output (arXiv 2402.09353). In float32, with unit roundoff u, D is off by what its product is,
T by ``t = bound(D) + u |T|``, and q, whose norm is summed in float64, relatively by
``p = |t| / (|T| - |t|) + u``. So ``q T`` is off by ``|q| (t + p (|T| + t)) + u |q T|``, and the
difference by one rounding more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from gemma_convert.convert.tensor import Array, Box, Tensor, blocks
from gemma_convert.convert.validation.exact import UNIT, ErrorBound, Product
from gemma_convert.surgery.delta import Arithmetic


class ExactDora(Tensor):
    """``m * (W + D) / ||W + D|| - W`` in float64.

    Args:
        weight: W in the layout of the adapter, a matrix.
        delta: D.
        magnitude: m, one number an output.
        inputs: The axis of the inputs, 0 or 1.
    """

    def __init__(self, weight: Tensor, delta: Tensor, magnitude: Tensor, inputs: int) -> None:
        self.weight = weight
        self.delta = delta
        self.magnitude = magnitude
        self.inputs = inputs
        self.shape = weight.shape
        self.dtype = np.dtype(np.float64)

    def read(self, box: Box) -> Array:
        return self.ratio(box) * self.total(box) - self.weight.read(box).astype(np.float64)

    def total(self, box: Box) -> Array:
        """W + D."""
        total: Array = self.weight.read(box).astype(np.float64) + self.delta.read(box)
        return total

    def ratio(self, box: Box) -> Array:
        """M / ||W + D||, with an axis of size 1 for the inputs."""
        return self.along(self.magnitude.numpy().astype(np.float64) / self.norms, box)

    @cached_property
    def norms(self) -> Array:
        """||W + D||, by output."""
        return row_norms(self, self.total)

    def along(self, by_output: Array, box: Box) -> Array:
        """The share of ``box`` in numbers by output, with an axis of size 1 for the inputs."""
        start, stop = box[1 - self.inputs]
        return np.expand_dims(by_output[start:stop], self.inputs)


class DoraBound(Tensor):
    """How far float32 may be from `ExactDora`; arguments as there, but ``delta`` is a bound."""

    def __init__(self, weight: Tensor, delta: Tensor, magnitude: Tensor, inputs: int) -> None:
        assert isinstance(delta, ErrorBound)
        self.exact = ExactDora(weight, delta.exact, magnitude, inputs)
        self.delta = delta
        self.shape = weight.shape
        self.dtype = np.dtype(np.float64)

    def read(self, box: Box) -> Array:
        exact = self.exact
        ratio, total, off = np.abs(exact.ratio(box)), np.abs(exact.total(box)), self._off(box)
        relative = exact.along(self._relative, box)
        product = ratio * (off + relative * (total + off))
        product += UNIT * (ratio * total + product)
        found: Array = product + UNIT * (np.abs(exact.read(box)) + product)
        return found

    def _off(self, box: Box) -> Array:
        """How far W + D may be off."""
        bound = self.delta.read(box)
        off: Array = bound + UNIT * (np.abs(self.exact.total(box)) + bound)
        return off

    @cached_property
    def _relative(self) -> Array:
        """How far the ratio may be off, relative to itself, by output."""
        off = row_norms(self.exact, self._off)
        relative: Array = off / (self.exact.norms - off) + UNIT
        return relative


def row_norms(dora: ExactDora, values: Callable[[Box], Array]) -> Array:
    """The Frobenius norm of ``values`` over the inputs, by output."""
    squares = np.zeros(dora.shape[1 - dora.inputs])
    for box in blocks(dora):
        start, stop = box[1 - dora.inputs]
        squares[start:stop] += np.square(values(box)).sum(dora.inputs)
    return np.sqrt(squares)


class Scaled(Tensor):
    """A delta in float64 multiplied by the weight of its adapter."""

    def __init__(self, delta: Tensor, weight: float) -> None:
        self.delta = delta
        self.weight = weight
        self.shape = delta.shape
        self.dtype = delta.dtype

    def read(self, box: Box) -> Array:
        return self.delta.read(box) * self.weight


class ScaledBound(Scaled):
    """How far float32 may be from `Scaled`: the weight and the product are rounded too."""

    def read(self, box: Box) -> Array:
        assert isinstance(self.delta, DoraBound)
        bound = self.delta.read(box)
        rounding = 2 * UNIT * (np.abs(self.delta.exact.read(box)) + bound)
        return abs(self.weight) * (bound + rounding)


EXACT = Arithmetic(Product, ExactDora, Scaled)
"""Deltas in float64."""

BOUND = Arithmetic(ErrorBound, DoraBound, ScaledBound)
"""How far those of the merge may be from them."""
