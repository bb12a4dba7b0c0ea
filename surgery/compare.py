"""Two versions of a weight: one is used, how far the other is from it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array, Box, Tensor, whole
from gemma_convert.surgery.quantised import wide_of


@dataclass(frozen=True)
class Difference:
    """How far two versions lie apart, added up over blocks.

    Attributes:
        largest: Largest absolute difference of two values.
        total: Sum of the absolute differences.
        size: Number of values.
    """

    largest: float = 0.0
    total: float = 0.0
    size: int = 0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            max(self.largest, other.largest), self.total + other.total, self.size + other.size
        )

    @property
    def mean(self) -> float:
        """Mean absolute difference."""
        return self.total / self.size if self.size else 0.0


class Compared(Tensor):
    """A tensor as it is; what is read of it is compared with another version.

    Args:
        used: The values.
        other: The other version, of the same shape.
    """

    def __init__(self, used: Tensor, other: Tensor) -> None:
        self.used = used
        self.other = other
        self.shape = used.shape
        self.dtype = used.dtype
        self._seen: dict[Box, Difference] = {}

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.used, self.other)

    @property
    def wide(self) -> Tensor:
        return Compared(self.used.wide, self.other)

    @property
    def difference(self) -> Difference:
        """How far the other version is from all boxes read so far."""
        return sum((self._seen[box] for box in sorted(self._seen)), Difference())

    def findings(self) -> dict[str, Any]:
        """The `difference`."""
        return asdict(self.difference)

    def recall(self, findings: Mapping[str, Any]) -> None:
        """Take over the difference that an earlier run found."""
        self._seen = {whole(self.shape): Difference(**findings)}

    def read(self, box: Box) -> Array:
        values = self.used.read(box)
        wide = wide_of(values.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # `Merged` refuses what is not finite
            apart = np.abs(values.astype(wide) - self.other.read(box).astype(wide))
        self._seen[box] = Difference(
            float(apart.max()), float(apart.sum(dtype=np.float64)), apart.size
        )
        return values
