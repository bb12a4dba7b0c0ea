"""Axis patterns: which axes a stored array has, and how boxes of it map to ranges of the axes.

``"(k h) d"`` says that an array has two dimensions, the first of which runs over k (outer) and h
(inner), the second over d. `Ranges` gives for each axis a ``(start, stop)``; a box of the stored
array and ranges of the axes are two views of the same values. Where a box cannot be said exactly
in ranges, or ranges in a box, the smallest that covers it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from einops import EinopsError
from einops.parsing import ParsedExpression

from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.tensor import Box

Sizes = Mapping[str, int]
Ranges = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Pattern:
    """A parsed axis pattern.

    Attributes:
        text: As written, in einops' syntax; ``1`` is a dimension of size one.
        groups: For each dimension of the array its axes, outermost first.
    """

    text: str
    groups: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes in memory order."""
        return tuple(axis for group in self.groups for axis in group)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The array's shape, given the sizes of its axes."""
        return tuple(prod(sizes[axis] for axis in group) for group in self.groups)

    def ranges(self, box: Box, sizes: Sizes) -> dict[str, tuple[int, int]]:
        """The smallest ranges of the axes that cover ``box``."""
        found: dict[str, tuple[int, int]] = {}
        for group, (start, stop) in zip(self.groups, box, strict=True):
            found.update(_unravel(group, start, stop, sizes))
        return found

    def box(self, ranges: Ranges, sizes: Sizes) -> Box:
        """The smallest box that covers ``ranges``."""
        return tuple(_ravel(group, ranges, sizes) for group in self.groups)

    def describe(self, sizes: Sizes) -> str:
        """The pattern with its numbers, for messages: ``(k h) d = (2 7) 10``, or ``a scalar``."""
        if not self.groups:
            return "a scalar"
        numbers = " ".join(
            f"({' '.join(str(sizes[a]) for a in group)})"
            if len(group) > 1
            else str(prod(sizes[a] for a in group))
            for group in self.groups
        )
        return f"{self.text} = {numbers}"


@cache
def parse(text: str) -> Pattern:
    """Parse a pattern in einops' syntax.

    Raises:
        LayoutError: If it is not one, uses an ellipsis, or has a dimension without a name.
    """
    try:
        parsed = ParsedExpression(text)
    except EinopsError as error:
        raise LayoutError(f"axis pattern {text!r}: {error}", "use einops' syntax") from error
    if parsed.has_ellipsis:
        raise LayoutError(f"axis pattern {text!r} has an ellipsis", "name every axis")
    if parsed.has_non_unitary_anonymous_axes:
        raise LayoutError(f"axis pattern {text!r} has a number for an axis", "name every axis")
    return Pattern(text, tuple(tuple(group) for group in parsed.composition))


def _unravel(
    group: Sequence[str], start: int, stop: int, sizes: Sizes
) -> dict[str, tuple[int, int]]:
    """Ranges of the axes of one dimension that cover its indices ``start`` to ``stop``."""
    found: dict[str, tuple[int, int]] = {}
    for depth, axis in enumerate(group):
        inner = prod(sizes[a] for a in group[depth + 1 :])
        first, last = start // inner, (stop - 1) // inner
        found[axis] = (first, last + 1)
        if last > first:  # more than one outer index: take all of every inner axis
            found.update({a: (0, sizes[a]) for a in group[depth + 1 :]})
            return found
        start, stop = start - first * inner, stop - first * inner
    return found


def _ravel(group: Sequence[str], ranges: Ranges, sizes: Sizes) -> tuple[int, int]:
    """Indices of one dimension that cover ``ranges`` of its axes."""
    first = last = 0
    for axis in group:
        start, stop = ranges[axis]
        first, last = first * sizes[axis] + start, last * sizes[axis] + stop - 1
    return first, last + 1
