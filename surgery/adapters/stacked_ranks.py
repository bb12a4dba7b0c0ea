"""Pairs of weights that a layout joins (k and v), with A's that differ: ranks behind one another.

A of the joined weight holds the ranks of all parts, and B, block-diagonal, is zero for each part in
the ranks of the others. It can be taken apart again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import einops
import numpy as np

from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.relayout import agree
from gemma_convert.convert.tensor import Array, Box, Tensor
from gemma_convert.surgery.adapters.forms import RANK
from gemma_convert.surgery.adapters.place import Placed


class Joined(Tensor):
    """Tensors behind one another along one axis."""

    action = "rearranged"

    def __init__(self, parts: Sequence[Tensor], axis: int) -> None:
        self.parts = tuple(parts)
        self.axis = axis
        first = parts[0].shape
        total = sum(part.shape[axis] for part in parts)
        self.shape = (*first[:axis], total, *first[axis + 1 :])
        self.dtype = parts[0].dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return self.parts

    def read(self, box: Box) -> Array:
        start, stop = box[self.axis]
        found: list[Array] = []
        begin = 0
        for part in self.parts:
            end = begin + part.shape[self.axis]
            if max(begin, start) < min(end, stop):
                inner = (max(begin, start) - begin, min(end, stop) - begin)
                found.append(part.read((*box[: self.axis], inner, *box[self.axis + 1 :])))
            begin = end
        return np.concatenate(found, self.axis)


class Cut(Tensor):
    """The places from ``start`` to ``stop`` of a tensor along one axis."""

    action = "rearranged"

    def __init__(self, parent: Tensor, axis: int, start: int, stop: int) -> None:
        self.parent = parent
        self.axis = axis
        self.start = start
        self.shape = (*parent.shape[:axis], stop - start, *parent.shape[axis + 1 :])
        self.dtype = parent.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.parent,)

    def read(self, box: Box) -> Array:
        start, stop = box[self.axis]
        inner = (start + self.start, stop + self.start)
        return self.parent.read((*box[: self.axis], inner, *box[self.axis + 1 :]))


def own_ranks(
    placed: Placed, at: Mapping[str, int], places: Sequence[Mapping[str, int]], layout: Layout
) -> Placed:
    """``placed`` in the ranks of one of its parts, if it is stacked; else as it is.

    Args:
        placed: The pair of a weight that may be joined of several parts.
        at: The part.
        places: All parts of the parameter.
        layout: That of the pair.
    """
    mine = [place for place in places if agree(placed.at, place)]
    if len(mine) < 2:
        return placed
    ranks = _diagonal(_used(placed, mine, layout))
    if ranks is None:
        return placed
    axes = [rank_axis(placed, layout, side) for side in (0, 1)]
    pieces = [
        replace(
            placed.pair,
            a=Cut(placed.pair.a, axes[0], start, stop),
            b=Cut(placed.pair.b, axes[1], start, stop),
        )
        for start, stop in ranks
    ]
    if any(same_values(one.a, other.a) for one, other in combinations(pieces, 2)):
        return placed  # they would not be stacked again on the way back
    return replace(placed, pair=pieces[mine.index(at)])


def rank_axis(placed: Placed, layout: Layout, side: int) -> int:
    """The dimension of A (0) or B (1) that is the rank."""
    return placed.pair.form.patterns(placed.parameter.row, layout)[side].groups.index((RANK,))


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    if one is other:
        return True
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and one.numpy().tobytes() == other.numpy().tobytes()


def _used(placed: Placed, places: Sequence[Mapping[str, int]], layout: Layout) -> Array:
    """Which ranks B has a value in for each of ``places``: (places, r), of booleans."""
    pattern = placed.pair.form.patterns(placed.parameter.row, layout)[1]
    axes = [axis for axis in places[0] if axis not in placed.at]
    sizes = {axis: placed.sizes[axis] for axis in pattern.axes}
    rest = " ".join(axis for axis in pattern.axes if axis not in (RANK, *axes))
    b = placed.pair.b.numpy()
    text = f"{pattern.text} -> {' '.join(axes)} {RANK} ({rest})"
    used = einops.rearrange((b != 0) | np.signbit(b), text, **sizes).any(-1)
    return np.stack([used[tuple(place[axis] for axis in axes)] for place in places])


def _diagonal(used: Array) -> list[tuple[int, int]] | None:
    """The ranks of each part where they follow one another in order; None where they do not."""
    if not used.any(1).all():
        return None
    starts = [0, *map(int, used[1:].argmax(1)), used.shape[1]]
    ranks = list(pairwise(starts))
    inside = np.zeros_like(used)
    for part, (start, stop) in zip(inside, ranks, strict=True):
        part[start:stop] = True
    alone = all(start < stop for start, stop in ranks) and not (used & ~inside).any()
    return ranks if alone else None
