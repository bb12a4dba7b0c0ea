"""Weights that Qwix stores as codes and scales, as the numbers that training computed with.

The law (Qwix 0.1.8, ``qarray.dequantize``): ``W = (decode(codes) - zero) * scale``, each scale
repeated over the codes that it stands for: along the last contracted axis that is a tile, along the
contracted axes before it everything, along the others one. The product is rounded once to the
dtype of the scales, which is the one that the weight had in training, because that is what Qwix
multiplies with: activations that are floats always meet a dequantised weight there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.tensor import Array, Box, Tensor, ancestry, rounded

NF4 = np.array(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    np.float32,
)
"""The values of the sixteen codes of nf4 (Dettmers et al. 2023, arXiv 2305.14314, appendix E)."""

UINT4 = np.dtype(ml_dtypes.uint4)
"""The dtype of nf4's codes; those of other schemes are the numbers themselves."""

_LEAVES = {"qvalue": "codes", "scale": "scale", "zero_point": "zero"}
"""Last key of the parts of a quantised weight ``<name>.array`` to the argument that it is."""


class Dequantised(Tensor):
    """The weight that codes and scales stand for, in the dtype of the scales.

    Args:
        codes: What stands for the weight, of its shape.
        scale: Of as many axes; the size of each divides that of the codes.
        zero: The code of 0, shaped as ``scale``; None where that is code 0.
    """

    action = "computed"

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> None:
        self.codes = codes
        self.scale = scale
        self.zero = zero
        self.shape = codes.shape
        self.dtype = scale.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scale, *(() if self.zero is None else (self.zero,)))

    @property
    def tile(self) -> int | None:
        """How many codes of an axis share a scale; None where all of them do."""
        groups = zip(self.shape, self.scale.shape, strict=True)
        return next((size // count for size, count in groups if 1 < count < size), None)

    @property
    def whole_axis(self) -> int | None:
        """The size of the last axis whose codes all share a scale: a tile may be as large."""
        groups = zip(self.shape, self.scale.shape, strict=True)
        return next((size for size, count in reversed([*groups]) if count == 1 < size), None)

    def read(self, box: Box) -> Array:
        values = self._decoded(self.codes.read(box))
        if self.zero is not None:
            values -= spread(self.zero, box, self.shape).astype(values.dtype)
        values *= spread(self.scale, box, self.shape).astype(values.dtype)
        return rounded(values, self.dtype)

    def _decoded(self, codes: Array) -> Array:
        """The numbers of codes, in the dtype in which they are multiplied."""
        wide = wide_of(self.dtype)
        if codes.dtype == UINT4:
            codes = NF4[codes.astype(np.uint8)].astype(self.dtype)
        numbers: Array = codes.astype(wide)
        return numbers


def wide_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which values of ``dtype`` are computed with: float32, or float64 for itself."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def spread(small: Tensor, box: Box, shape: tuple[int, ...]) -> Array:
    """The values of ``small`` for every place of ``box`` in a tensor of ``shape``.

    Each value stands for an equal part of every axis. Axes along which there is one value keep
    the size 1.
    """
    sizes = [size // count for size, count in zip(shape, small.shape, strict=True)]
    array = small.read(groups(box, sizes))
    index = [
        np.arange(start, stop) // size - start // size if count > 1 else np.zeros(1, int)
        for (start, stop), size, count in zip(box, sizes, small.shape, strict=True)
    ]
    values: Array = array[np.ix_(*index)]
    return values


def groups(box: Box, sizes: list[int]) -> Box:
    """The smallest box of groups that covers ``box``, if ``sizes`` places of an axis are one."""
    return tuple(
        (start // size, -(-stop // size)) for (start, stop), size in zip(box, sizes, strict=True)
    )


def dequantised(source: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with every ``<name>.array.qvalue`` and its scales as the weight ``<name>``.

    Args:
        source: The checkpoint, for messages.
        tensors: A tree of Qwix, without LoRA factors; any others are returned as they are.

    Raises:
        InputError: If a part is missing, or its shape does not divide that of the codes.
    """
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".array.")
        if stem and leaf in _LEAVES:
            parts.setdefault(stem, {})[leaf] = tensor
        else:
            found[name] = tensor
    return found | {stem: _weight(source, stem, leaves) for stem, leaves in parts.items()}


def tiles_of(weights: Iterable[Dequantised]) -> list[int | None]:
    """The tiles that occur; one where all weights may have it, for some of a whole axis."""
    weights = list(weights)
    found = list(dict.fromkeys(weight.tile for weight in weights))
    named = [tile for tile in found if tile]
    whole = {weight.whole_axis for weight in weights if weight.tile is None}
    return [*named] if len(named) == 1 and whole <= {*named} else found


def is_quantised(tensor: Tensor) -> bool:
    """Whether values of ``tensor`` come from codes."""
    return any(isinstance(step, Dequantised) for step in ancestry(tensor))


def _weight(source: str, stem: str, leaves: Mapping[str, Tensor]) -> Dequantised:
    for leaf in ("qvalue", "scale"):
        if leaf not in leaves:
            raise InputError(
                f"{source}: {stem}.array.{leaf} is missing, of a quantised weight",
                "the checkpoint is incomplete",
            )
    codes = leaves["qvalue"]
    for leaf, part in leaves.items():
        fits = len(part.shape) == len(codes.shape) and all(
            count and size % count == 0 for size, count in zip(codes.shape, part.shape, strict=True)
        )
        if not fits:
            raise InputError(
                f"{source}: {stem}.array.{leaf} has shape {list(part.shape)}, which does not "
                f"divide that of its codes, {list(codes.shape)}",
                "codes and scales belong to different weights",
            )
    if not dtypes.is_weight(leaves["scale"].dtype) or codes.dtype.itemsize > 1:
        raise InputError(
            f"{source}: {stem}: codes of {codes.dtype} with scales of {leaves['scale'].dtype}",
            "Qwix has codes of at most a byte, and scales of bfloat16, float16 or float32",
        )
    return Dequantised(**{_LEAVES[leaf]: part for leaf, part in leaves.items()})
