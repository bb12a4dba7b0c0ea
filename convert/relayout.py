"""Convert a checkpoint from one layout to another: the two-way use of the rows.

One rule serves both directions. A box of a target tensor is turned into ranges of the logical
axes; those ranges are read from the source tensors that hold them; einops brings the axes into
the target's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import einops
import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.layouts import Layout, Spelling
from gemma_convert.convert.model import Model, Parameter
from gemma_convert.convert.pattern import Pattern, Ranges, Sizes
from gemma_convert.convert.tensor import Array, Box, Tensor, Zeros, extent, slices


@dataclass(frozen=True)
class Part:
    """One stored tensor of a parameter: where it stands on the axes that its name spells."""

    tensor: Tensor
    at: Mapping[str, int]


class Relaid(Tensor):
    """A tensor of the target layout, read from the tensors of the source layout.

    Args:
        sources: The stored tensors of the parameter in the source layout.
        source: Axis pattern of each of them.
        target: Axis pattern of this tensor.
        at: Position of this tensor on the axes that its own name spells.
        sizes: Sizes of all axes.
    """

    action = "rearranged"

    def __init__(
        self,
        sources: Sequence[Part],
        source: Pattern,
        target: Pattern,
        at: Mapping[str, int],
        sizes: Sizes,
    ) -> None:
        self.sources = [part for part in sources if _agree(part.at, at)]
        self.source = source
        self.target = target
        self.at = at
        self.sizes = sizes
        self.shape = target.shape(sizes)
        self.dtype = self.sources[0].tensor.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return tuple(part.tensor for part in self.sources)

    def read(self, box: Box) -> Array:
        covered = self.target.ranges(box, self.sizes)
        fixed = {axis: (index, index + 1) for axis, index in self.at.items()}
        region, axes = self._region({**covered, **fixed})
        sizes = {axis: stop - start for axis, (start, stop) in covered.items()}
        kept = [axis for axis in axes if axis in covered]
        region = region[tuple(slice(None) if axis in covered else 0 for axis in axes)]
        array = einops.rearrange(region, f"{' '.join(kept)} -> {self.target.text}", **sizes)
        return array[_within(box, self.target.box(covered, self.sizes))]

    def _region(self, ranges: Ranges) -> tuple[Array, tuple[str, ...]]:
        """The values inside ``ranges``, with one dimension an axis, and the axes' order."""
        spelled = tuple(self.sources[0].at)
        axes = (*spelled, *self.source.axes)
        parts = [part for part in self.sources if _inside(part.at, ranges)]
        if len(parts) == 1:
            return self._read(parts[0].tensor, ranges)[(np.newaxis,) * len(spelled)], axes
        region = np.empty([ranges[a][1] - ranges[a][0] for a in axes], self.dtype)
        for part in parts:
            index = tuple(part.at[axis] - ranges[axis][0] for axis in spelled)
            region[index] = self._read(part.tensor, ranges)
        return region, axes

    def _read(self, tensor: Tensor, ranges: Ranges) -> Array:
        """The values of one stored tensor inside ``ranges``, one dimension an axis."""
        covered = self.source.ranges(self.source.box(ranges, self.sizes), self.sizes)
        box = self.source.box(covered, self.sizes)  # whole in every axis, so that it can be split
        sizes = {axis: stop - start for axis, (start, stop) in covered.items()}
        text = f"{self.source.text} -> {' '.join(self.source.axes)}"
        array: Array = einops.rearrange(tensor.read(box), text, **sizes)
        return array[
            tuple(
                slice(ranges[axis][0] - covered[axis][0], ranges[axis][1] - covered[axis][0])
                for axis in self.source.axes
            )
        ]


def relayout(
    checkpoint: Checkpoint,
    model: Model,
    source: Spelling,
    target: Spelling,
    *,
    partial: bool = False,
) -> Checkpoint:
    """Convert ``checkpoint`` from one spelling to another, lazily.

    Args:
        checkpoint: Tensors spelled in ``source``.
        model: The dimensions they must have.
        source: How they are spelled.
        target: How they are to be spelled.
        partial: Whether parameters may be absent altogether (the deltas of an adapter).

    Raises:
        LayoutError: If a tensor is missing, left over, or has another shape than ``model`` says.
    """
    for spelling in (source, target):
        _require_layout(model, spelling.layout)
    problems = disagreements(checkpoint, model, source, partial=partial)
    if problems:
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise LayoutError(
            f"{checkpoint.source}: {problems[0]}{more}",
            "config.json and tensors belong to different models, or the checkpoint is incomplete",
        )
    made: dict[str, Tensor] = {}
    filled: list[str] = []
    dtype = next(iter(checkpoint.values())).dtype
    for parameter in model.parameters():
        parts = [
            Part(checkpoint[name], at)
            for name, at in _stored_names(parameter, source)
            if name in checkpoint
        ]
        if parts:
            targets = _target_tensors(parameter, parts, source, target)
            _require_whole(checkpoint, parameter, targets, source, target)
            made.update(targets)
        elif parameter.unread and target.layout.wants_unread and not partial:
            shape = parameter.row.cells[target.layout.name].pattern.shape(parameter.sizes)
            zeros = {name: Zeros(shape, dtype) for name, _ in _stored_names(parameter, target)}
            made.update(zeros)
            filled += zeros
    return checkpoint.replace(tensors=made, notes=checkpoint.notes + _filled_note(filled))


def _filled_note(names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return (
        f"{len(names)} tensors that the model has but never reads are not in the source and were "
        f"filled with zeros, such as {names[0]}",
    )


def _require_layout(model: Model, layout: Layout) -> None:
    if any(layout.name not in row.cells for row in model.family.rows):
        known = set.intersection(*(set(row.cells) for row in model.family.rows))
        raise LayoutError(
            f"{model.family.name} has no names in layout {layout.name}",
            f"its layouts: {', '.join(sorted(known))}",
        )


def disagreements(
    checkpoint: Checkpoint, model: Model, spelling: Spelling, *, partial: bool = False
) -> list[str]:
    """Where the tensors of ``checkpoint`` are not those of ``model``, a sentence each.

    Args:
        checkpoint: Tensors spelled in ``spelling``.
        model: The dimensions they must have.
        spelling: How they are spelled.
        partial: Whether parameters may be absent altogether.
    """
    wrong: list[str] = []
    known: set[str] = set()
    for parameter in model.parameters():
        names = [name for name, _ in _stored_names(parameter, spelling)]
        known.update(names)
        found = {name: checkpoint[name] for name in names if name in checkpoint}
        if not partial and (found or not parameter.unread):
            wrong += [f"{name}: missing ({parameter})" for name in names if name not in found]
        pattern = parameter.row.cells[spelling.layout.name].pattern
        wrong += [
            f"{name}: expected {pattern.describe(parameter.sizes)} by config.json, "
            f"found shape {list(tensor.shape)}"
            for name, tensor in found.items()
            if tensor.shape != pattern.shape(parameter.sizes)
        ]
        if len({tensor.dtype for tensor in found.values()}) > 1:
            kinds = ", ".join(f"{name} {tensor.dtype}" for name, tensor in found.items())
            wrong.append(f"{parameter} has several dtypes: {kinds}")
    what = f"{model.family.name} of {len(model.layers)} layers in layout {spelling.layout.name}"
    wrong += [f"{name}: no parameter of a {what}" for name in checkpoint if name not in known]
    return wrong


def _stored_names(parameter: Parameter, spelling: Spelling) -> list[tuple[str, dict[str, int]]]:
    """Full names of the tensors that hold ``parameter``, with their places on spelled axes."""
    return [(spelling.prefix + s, at) for s, at in parameter.parts(spelling.layout.name)]


def _require_whole(
    checkpoint: Checkpoint,
    parameter: Parameter,
    targets: Mapping[str, Tensor],
    source: Spelling,
    target: Spelling,
) -> None:
    """Refuse a parameter of which the source has some of what one of ``targets`` is made of."""
    for target_name, target_at in _stored_names(parameter, target):
        for name, at in _stored_names(parameter, source):
            if target_name in targets and _agree(at, target_at) and name not in checkpoint:
                raise LayoutError(
                    f"{checkpoint.source}: {name}: missing ({parameter})",
                    f"{target_name} is made of it too",
                )


def _target_tensors(
    parameter: Parameter, parts: list[Part], source: Spelling, target: Spelling
) -> dict[str, Tensor]:
    """The tensors of ``parameter`` in the target's spelling."""
    from_cell = parameter.row.cells[source.layout.name]
    to_cell = parameter.row.cells[target.layout.name]
    made: dict[str, Tensor] = {}
    for name, at in _stored_names(parameter, target):
        if not any(_agree(part.at, at) for part in parts):
            continue  # a delta that this tensor has no share in
        same = [part for part in parts if part.at == at]
        if same and from_cell.pattern == to_cell.pattern:
            made[name] = same[0].tensor  # nothing to do: the bytes can be copied
        else:
            made[name] = Relaid(parts, from_cell.pattern, to_cell.pattern, at, parameter.sizes)
    return made


def _agree(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether two places can hold the same values: they name no axis at different positions."""
    return all(other.get(axis, index) == index for axis, index in one.items())


def _inside(at: Mapping[str, int], ranges: Ranges) -> bool:
    return all(ranges[axis][0] <= index < ranges[axis][1] for axis, index in at.items())


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    """``box`` as an index into an array that holds ``outer``."""
    shifted = tuple(
        (start - begin, stop - begin) for (start, stop), (begin, _) in zip(box, outer, strict=True)
    )
    assert extent(shifted) == extent(box)
    return slices(shifted)
