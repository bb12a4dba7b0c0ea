"""Quantise a weight as Qwix did when the run began: the same codes, the same scales.

The rule of ``qwix.LoraRule(weight_qtype=..., tile_size=...)`` (Qwix 0.1.8, ``qarray.quantize`` with
its calibration ``absmax``), in the dtype of the weight:

    scale = max|W| over a tile / bound      bound 127.5 for int8, 7.5 for int4, 1 for nf4
    codes = W / scale, rounded to even, clipped, or for nf4 to the nearest of sixteen values

XLA divides by a value that is broadcast by multiplying by its reciprocal (its algebraic
simplifier, jax 0.10.2), which shows in the last bit of a float32 scale; so it is done here. A
scale below the root of the dtype's least normal number becomes 1. Tiles lie along the last
contracted axis; along the contracted axes before it, and without tiles, one scale stands for the
whole axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any

import ml_dtypes
import numpy as np

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.relayout import within
from gemma_convert.convert.tensor import Array, Box, Tensor, blocks, extent, slices, whole
from gemma_convert.surgery.quantised import NF4, UINT4, Dequantised, groups, spread, wide_of

CODES = {"int8": np.dtype(np.int8), "int4": np.dtype(ml_dtypes.int4), "nf4": UINT4}
"""``weight_qtype`` to the dtype of its codes."""

_BOUNDS = {"int8": 127.5, "int4": 7.5, "nf4": 1.0}
_LIMITS = {CODES["int8"]: (-128, 127), CODES["int4"]: (-8, 7)}
_LEAST_SCALE = {
    np.dtype(ml_dtypes.bfloat16): 2.0**-63,
    np.dtype(np.float16): 2.0**-7,
    np.dtype(np.float32): 2.0**-63,
    np.dtype(np.float64): 2.0**-511,
}

QTYPES = tuple(CODES)
"""The values of ``weight_qtype`` that are known here."""

DTYPES = {str(dtype): dtype for dtype in _LEAST_SCALE}
"""The dtypes of weights that can be quantised, by name."""


@dataclass(frozen=True)
class Scheme:
    """How a run quantised the weights that it adapted.

    Attributes:
        qtype: One of `QTYPES`.
        tile: How many values of the last contracted axis share a scale; a float is the share of
            the axis, as Qwix has it; None for the whole axis.
        dtype: The dtype that the weights had, in which it was done; None if not known.
    """

    qtype: str
    tile: int | float | None = None
    dtype: np.dtype[Any] | None = None

    def __str__(self) -> str:
        tiles = f"tile {self.tile:g}" if self.tile else "no tiles"
        return f"{self.qtype}, {tiles}{f', from {self.dtype}' if self.dtype else ''}"

    def groups(self, name: str, shape: tuple[int, ...], contracted: list[int]) -> list[int]:
        """How many places of each axis share a scale.

        Args:
            name: The weight, for messages.
            shape: Its shape.
            contracted: Its contracted axes, in order.

        Raises:
            AdapterError: If the tile does not divide the axis.
        """
        sizes = [size if axis in contracted else 1 for axis, size in enumerate(shape)]
        if self.tile:
            axis = contracted[-1]
            share = isinstance(self.tile, float)
            sizes[axis] = round(shape[axis] * self.tile) if share else int(self.tile)
            if sizes[axis] < 1 or shape[axis] % sizes[axis]:
                raise AdapterError(
                    f"{name}: tiles of {sizes[axis]} do not divide axis {axis} of {list(shape)}",
                    "pass the tile_size of the training run",
                )
        return sizes


def quantised(weight: Tensor, scheme: Scheme, sizes: list[int]) -> Dequantised:
    """``weight`` as it is after quantising it by ``scheme``, in its own dtype.

    Args:
        weight: Its dtype is the one that it had in training.
        scheme: From the training run.
        sizes: From `Scheme.groups`.
    """
    scale = Scales(weight, scheme.qtype, sizes)
    return Dequantised(Codes(weight, scale, scheme.qtype), scale)


class Scales(Tensor):
    """The scales of a weight.

    Where one stands for a whole axis, all of them are computed once, a block of the weight at a
    time, and kept: they are few. Those of tiles are computed from the tiles, the last box kept.

    Args:
        weight: What is quantised.
        qtype: One of `QTYPES`.
        sizes: How many places of each axis share a scale.
    """

    action = "computed"

    def __init__(self, weight: Tensor, qtype: str, sizes: list[int]) -> None:
        self.weight = weight
        self.bound = _BOUNDS[qtype]
        self.sizes = sizes
        self.shape = tuple(n // size for n, size in zip(weight.shape, sizes, strict=True))
        self.dtype = weight.dtype
        spans = zip(weight.shape, sizes, strict=True)
        self._few = any(size == n > 1 for n, size in spans)
        self._last: tuple[Box, Array] | None = None
        self._lock = Lock()

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def read(self, box: Box) -> Array:
        if not self._few:
            return self._kept(box)
        with self._lock:  # all of the weight is read, which one thread does for the others
            return self._kept(whole(self.shape))[slices(box)]

    def _kept(self, box: Box) -> Array:
        last = self._last
        if last is None or last[0] != box:
            last = (box, self._compute(box))
            self._last = last
        return last[1]

    def _compute(self, box: Box) -> Array:
        wide = wide_of(self.dtype)
        largest = np.zeros(extent(box), wide)
        own = tuple((a * n, b * n) for (a, b), n in zip(box, self.sizes, strict=True))
        for part in blocks(self.weight) if self._few else (own,):
            found = _largest(np.abs(self.weight.read(part).astype(wide)), part, self.sizes)
            here = within(groups(part, self.sizes), box)
            largest[here] = np.maximum(largest[here], found)
        scale = _divided(largest.astype(self.dtype), np.full((), self.bound, self.dtype))
        small = scale.astype(wide) < _LEAST_SCALE[self.dtype]
        return np.where(small, np.ones_like(scale), scale)


class Codes(Tensor):
    """The codes of a weight."""

    action = "computed"

    def __init__(self, weight: Tensor, scale: Scales, qtype: str) -> None:
        self.weight = weight
        self.scale = scale
        self.shape = weight.shape
        self.dtype = CODES[qtype]

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.weight, self.scale)

    def read(self, box: Box) -> Array:
        weight, scale = self.weight.read(box), spread(self.scale, box, self.shape)
        ratio = _divided(weight, scale, broadcast=self.scale.shape != self.shape)
        ratio = ratio.astype(wide_of(weight.dtype))
        if self.dtype == UINT4:
            return _nearest(ratio.astype(np.float32)).astype(self.dtype)
        with np.errstate(invalid="ignore"):  # NaN has no code; its scale is NaN
            codes = np.rint(ratio).clip(*_LIMITS[self.dtype]).astype(np.int8)
        return codes.astype(self.dtype)


def _divided(values: Array, by: Array, *, broadcast: bool = True) -> Array:
    """``values`` / ``by`` as XLA computes it, in their dtype; bfloat16 by way of float32."""
    dtype = values.dtype
    if dtype == ml_dtypes.bfloat16:
        values, by = values.astype(np.float32), by.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio: Array = values * (np.ones_like(by) / by) if broadcast else values / by
    return ratio.astype(dtype)


def _largest(values: Array, box: Box, sizes: list[int]) -> Array:
    """The largest of ``values``, which lie at ``box``, in each group."""
    for axis, ((start, stop), size) in enumerate(zip(box, sizes, strict=True)):
        if size > 1:
            first = np.arange(start // size, -(-stop // size)) * size - start
            values = np.maximum.reduceat(values, np.maximum(first, 0), axis)
    return values


def _nearest(values: Array) -> Array:
    """The code of nf4 nearest to each of ``values``, float32; the lower one of two as near."""
    above = np.searchsorted(NF4, values).clip(1, len(NF4) - 1)
    low, high = np.abs(NF4[above - 1] - values), np.abs(NF4[above] - values)
    codes: Array = (above - (low <= high)).astype(np.uint8)
    return codes
