"""Convert a checkpoint from one layout to another: the two-way use of the rows.

One rule serves both directions. A box of a target tensor is turned into ranges of the logical
axes; those ranges are read from the source tensors that hold them; einops brings the axes into
the target's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import einops
import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.fit import require_fit, stored_names
from gemma_convert.convert.layouts import Layout, Spelling
from gemma_convert.convert.network import Network, Parameter
from gemma_convert.convert.pattern import Pattern, Ranges, Sizes
from gemma_convert.convert.repeats import Part, once
from gemma_convert.convert.stack import stacked, unstacked
from gemma_convert.convert.tensor import Array, Box, Tensor, Zeros, ancestry, cast, extent, slices
from gemma_convert.convert.values import AS_IT_IS, Affine, Revalued


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
        self.sources = [part for part in sources if agree(part.at, at)]
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
        return array[within(box, self.target.box(covered, self.sizes))]

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
    model: Network,
    source: Spelling,
    target: Spelling,
    *,
    partial: bool = False,
    deltas: bool = False,
    dtype: np.dtype[Any] | None = None,
    computed: np.dtype[Any] | None = None,
    spare: Mapping[str, Tensor] | None = None,
    by_layer: bool = False,
) -> Checkpoint:
    """Convert ``checkpoint`` from one spelling to another, lazily.

    Args:
        checkpoint: Tensors spelled in ``source``.
        model: The dimensions they must have.
        source: How they are spelled.
        target: How they are to be spelled.
        partial: Whether parameters may be absent altogether.
        deltas: Whether the tensors are differences of weights: offsets do not apply.
        dtype: Dtype of the tensors; as in the source if None.
        computed: Dtype of those whose values the two layouts store differently; ``dtype`` if None.
        spare: The base's tensors in ``target``, ``by_layer``: parameters that nothing reads are
            taken from it where the source lacks them, and left out where both layout and base can
            do without.
        by_layer: Whether to leave a tensor a layer where the layout would stack them.

    Raises:
        LayoutError: If a tensor is missing, left over, or has another shape than ``model`` says.
    """
    for spelling in (source, target):
        _require_layout(model, spelling.layout)
    stored, checkpoint = checkpoint, unstacked(checkpoint, model, source)
    require_fit(checkpoint, model, source, partial=partial)
    made: dict[str, Tensor] = {}
    filled: list[str] = []
    refilled: list[str] = []
    dropped: dict[str, str] = {}
    filler = dtype or next((tensor.dtype for tensor in checkpoint.values()), _WIDE)
    for parameter in model.parameters():
        parts = [
            Part(checkpoint[name], at, name)
            for name, at in stored_names(parameter, source)
            if name in checkpoint
        ]
        if parts and parameter.unread and not partial and _without(parameter, target, spare):
            names = [name for name, _ in stored_names(parameter, source)]
            dropped |= dict.fromkeys(names, _UNREAD)
        elif parts:
            parts, copies = once(parts, parameter.row, target.layout)
            dropped |= copies
            change = Change(parameter, source, target, dtype, computed or dtype, is_delta=deltas)
            targets = change.tensors(parts)
            _require_whole(checkpoint, parameter, targets, source, target)
            made |= targets
        elif parameter.unread and not partial:
            names = [name for name, _ in stored_names(parameter, target)]
            if spare and all(name in spare for name in names):
                made |= {name: cast(spare[name], filler) for name in names}
                refilled += names
            elif target.layout.unread == "wanted":
                shape = parameter.shape(target.layout)
                made |= {name: Zeros(shape, filler) for name in names}
                filled += names
    made_of = checkpoint.replace(
        tensors=made,
        notes=checkpoint.notes + _filled_note(filled, refilled),
        dropped={**checkpoint.dropped, **_as_stored(dropped, checkpoint, stored, made)},
    )
    return made_of if by_layer else stacked(made_of, model, target, partial=partial)


_UNREAD = "the model never reads it, and this layout's models, or the base, do not have it"


def _without(parameter: Parameter, target: Spelling, spare: Mapping[str, Tensor] | None) -> bool:
    """Whether a parameter that nothing reads is left out of ``target``."""
    if target.layout.unread != "carried" or spare is None:
        return target.layout.unread == "absent"
    return not any(name in spare for name, _ in stored_names(parameter, target))


def _as_stored(
    dropped: Mapping[str, str], layers: Checkpoint, stored: Checkpoint, made: Mapping[str, Tensor]
) -> dict[str, str]:
    """What is left out, by the name of the stacked array where no other layer of it is read."""
    read = {id(step) for tensor in made.values() for step in ancestry(tensor)}
    names = {id(tensor): name for name, tensor in stored.items() if id(tensor) not in read}
    found = {}
    for name, why in dropped.items():
        steps = ancestry(layers[name]) if name in layers else ()
        found[next((names[id(step)] for step in steps if id(step) in names), name)] = why
    return found


def _filled_note(zeros: list[str], taken: list[str]) -> tuple[str, ...]:
    return tuple(
        f"{len(names)} tensors that the model has but never reads are not in the source and were "
        f"{how}, such as {names[0]}"
        for names, how in ((zeros, "filled with zeros"), (taken, "taken from the base"))
        if names
    )


def _require_layout(model: Network, layout: Layout) -> None:
    if not model.is_in(layout):
        known = set.intersection(*(set(row.cells) for row in model.family.rows))
        raise LayoutError(
            f"{model.family.name} has no names in layout {layout.name}",
            f"its layouts: {', '.join(sorted(known))}",
        )


def _require_whole(
    checkpoint: Checkpoint,
    parameter: Parameter,
    targets: Mapping[str, Tensor],
    source: Spelling,
    target: Spelling,
) -> None:
    """Refuse a parameter of which the source has some of what one of ``targets`` is made of."""
    for target_name, target_at in stored_names(parameter, target):
        for name, at in stored_names(parameter, source):
            if target_name in targets and agree(at, target_at) and name not in checkpoint:
                raise LayoutError(
                    f"{checkpoint.source}: {name}: missing ({parameter})",
                    f"{target_name} is made of it too",
                )


@dataclass(frozen=True)
class Change:
    """One parameter on its way from one spelling to another.

    Attributes:
        parameter: The parameter.
        source: How it is spelled.
        target: How it is to be spelled.
        dtype: Dtype of the tensors; the source's if None.
        computed: Dtype of those whose values are computed; the source's if None.
        is_delta: Whether its tensors are differences of weights.
    """

    parameter: Parameter
    source: Spelling
    target: Spelling
    dtype: np.dtype[Any] | None
    computed: np.dtype[Any] | None
    is_delta: bool

    def tensors(self, parts: Sequence[Part]) -> dict[str, Tensor]:
        """The target's tensors, made of the source's."""
        made: dict[str, Tensor] = {}
        stored = stored_names(self.parameter, self.target)
        computed = any(
            self._values(self.source, part.at) != self._values(self.target, at)
            for part in parts
            for _, at in stored
            if agree(part.at, at)
        )
        # one dtype for all tensors of a parameter, as a fused array needs on the way back
        dtype = (self.computed if computed else self.dtype) or parts[0].tensor.dtype
        for name, at in stored:
            shares = [part for part in parts if agree(part.at, at)]
            if shares:  # else a delta that this tensor has no share in
                made[name] = self._tensor(shares, at, dtype)
        return made

    def _tensor(self, parts: Sequence[Part], at: Mapping[str, int], dtype: np.dtype[Any]) -> Tensor:
        """One target tensor: its axes in the target's order, its values as the target stores."""
        olds = {self._values(self.source, part.at) for part in parts}
        old, new = olds.pop(), self._values(self.target, at)
        if not olds:
            tensor = self._relaid(parts, at)
            return cast(tensor, dtype) if old == new else Revalued(tensor, old, new, dtype)
        # Parts stored in several ways, as MaxText's query beside its keys: first to plain values.
        plain = [
            replace(p, tensor=Revalued(p.tensor, self._values(self.source, p.at), AS_IT_IS, _WIDE))
            for p in parts
        ]
        return Revalued(self._relaid(plain, at), AS_IT_IS, new, dtype)

    def _values(self, spelling: Spelling, at: Mapping[str, int]) -> Affine:
        values = self.parameter.values(spelling.layout, at)
        return values.linear if self.is_delta else values

    def _relaid(self, parts: Sequence[Part], at: Mapping[str, int]) -> Tensor:
        row = self.parameter.row
        old, new = row.cell(self.source.layout).pattern, row.cell(self.target.layout).pattern
        known = row.cell(self.source.layout).axes
        at = {axis: index for axis, index in at.items() if axis in known}  # the others are copies
        same = [part for part in parts if part.at == at]
        if same and old == new:
            return same[0].tensor  # nothing to do: the bytes can be copied
        return Relaid(parts, old, new, at, self.parameter.sizes)


_WIDE = np.dtype(np.float32)


def agree(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether two places can hold the same values: they name no axis at different positions."""
    return all(other.get(axis, index) == index for axis, index in one.items())


def _inside(at: Mapping[str, int], ranges: Ranges) -> bool:
    return all(ranges[axis][0] <= index < ranges[axis][1] for axis, index in at.items())


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """``box`` as an index into an array that holds ``outer``."""
    shifted = tuple(
        (start - begin, stop - begin) for (start, stop), (begin, _) in zip(box, outer, strict=True)
    )
    assert extent(shifted) == extent(box)
    return slices(shifted)
