"""Layouts that store other values than Hugging Face: an offset, a scale, and the way back.

MaxText stores 1 + w where Hugging Face's norm multiplies by 1 + w, its embedding times the root of
the hidden size, its queries times the scale of the attention. All of these are one affine map.
It is computed in float32 and rounded once to the stored dtype, where the way back may not find
the value it came from; how many do not is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import frexp
from typing import Any

import numpy as np

from gemma_convert.convert.casting import converted
from gemma_convert.convert.tensor import Array, Box, Tensor, rounded, whole


@dataclass(frozen=True)
class Affine:
    """``stored = scale * value + offset``, where the value is Hugging Face's.

    Attributes:
        scale: A factor; float32's nearest is used.
        offset: An addend.
    """

    scale: float = 1.0
    offset: float = 0.0

    def store(self, values: Array) -> Array:
        """What is stored for ``values`` (float32 or float64)."""
        return values * self.scale + self.offset if self != AS_IT_IS else values

    def load(self, stored: Array) -> Array:
        """The values that ``stored`` (float32 or float64) stands for."""
        return (stored - self.offset) / self.scale if self != AS_IT_IS else stored

    @property
    def linear(self) -> Affine:
        """What happens to a difference of two values."""
        return Affine(self.scale)

    @property
    def is_exact(self) -> bool:
        """Whether it only moves the exponent, so that no rounding can happen."""
        return self.offset == 0 and abs(frexp(self.scale)[0]) == 0.5


AS_IT_IS = Affine()
"""Values as Hugging Face has them."""


class Revalued(Tensor):
    """A tensor stored by one affine map, as another stores it; float32 arithmetic, one rounding.

    Args:
        parent: Values as ``source`` stores them.
        source: How they are stored.
        target: How they are to be stored.
        dtype: The dtype to round to.
    """

    action = "computed"

    def __init__(
        self, parent: Tensor, source: Affine, target: Affine, dtype: np.dtype[Any]
    ) -> None:
        self.parent = parent
        self.source = source
        self.target = target
        self.shape = parent.shape
        self.dtype = np.dtype(dtype)
        self._lost: dict[Box, int] = {}

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.parent,)

    @property
    def wide(self) -> Tensor:
        return Revalued(self.parent, self.source, self.target, _wide(self.parent.dtype))

    @property
    def lost(self) -> int:
        """How many of the values read so far the way back would not find again."""
        return sum(self._lost.values())

    @property
    def may_lose(self) -> bool:
        """Whether rounding can make values differ on the way back."""
        return not (self.source.is_exact and self.target.is_exact)

    def findings(self) -> dict[str, Any]:
        """How many values are `lost`."""
        return {"lost": self.lost}

    def recall(self, findings: Mapping[str, Any]) -> None:
        """Take over how many an earlier run lost."""
        self._lost = {whole(self.shape): findings["lost"]}

    def read(self, box: Box) -> Array:
        values = self.parent.read(box)
        exact = converted(values, _wide(values.dtype, self.dtype))
        stored = rounded(self.target.store(self.source.load(exact)), self.dtype)
        back = self.source.store(self.target.load(converted(stored, exact.dtype)))
        self._lost[box] = int(np.count_nonzero(rounded(back, values.dtype) != values))
        return stored


def _wide(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if np.float64 in dtypes else np.float32)
