"""An adapter in another ecosystem's spelling and form, by the rows of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import HF, Layout, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.pattern import Pattern
from gemma_convert.convert.registry import names_text_parameter
from gemma_convert.convert.relayout import Relaid, agree
from gemma_convert.convert.repeats import Part
from gemma_convert.convert.tensor import Tensor, Zeros, cast
from gemma_convert.convert.values import AS_IT_IS, Affine, Revalued
from gemma_convert.surgery.adapters.adapter import Adapter, Pair
from gemma_convert.surgery.adapters.forms import QWIX, RANK, Form
from gemma_convert.surgery.adapters.place import Placed, no_module, place
from gemma_convert.surgery.adapters.stacked_ranks import (
    Joined,
    own_ranks,
    rank_axis,
    same_values,
)

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class _Group:
    """The pairs that one target weight is made of, brought to one rank and one scale.

    Attributes:
        pairs: The pairs, their A's left as they are.
        a: The A of all of them.
        b: The B of each.
        rank: The rank of these.
    """

    pairs: tuple[Placed, ...]
    a: Tensor
    b: tuple[Tensor, ...]
    rank: int


def respell(adapter: Adapter, model: Model, spelling: Spelling, form: Form) -> Adapter:
    """``adapter`` spelled in ``spelling``, its factors in ``form``; nothing is multiplied out.

    Where the target joins weights that have pairs of their own (k and v), equal A's become one, and
    different ones are stacked: rank r_k + r_v, each B zero in the other's ranks. Where it splits
    what was so stacked, each part gets its own ranks back.

    Args:
        adapter: Any.
        model: The base's dimensions.
        spelling: How to name the weights.
        form: How to lay out the factors.

    Raises:
        AdapterError: If the target cannot hold a part of it; the message names the part.
    """
    layout = adapter.spelling.layout
    placed = {name: _plain(p, adapter) for name, p in place(adapter, model).items()}
    _require_factors(adapter, placed, form)
    pairs: dict[str, Pair] = {}
    scales: dict[str, float] = {}
    notes: list[str] = []
    unused = list(adapter.unused)
    for parameter in {id(p.parameter): p.parameter for p in placed.values()}.values():
        mine = [p for p in placed.values() if p.parameter is parameter]
        parts = parameter.parts(spelling.layout)
        for short, at in parts:
            places = [place for _, place in parts]
            group = [own_ranks(p, at, places, layout) for p in mine if agree(p.at, at)]
            if not group:
                continue
            name = spelling.prefix + short
            joined, note = _joined(adapter, name, group)
            notes += [note] if note else []
            kept = {id(step) for step in (joined.a, *joined.a.parents)}
            unused += [
                (p.pair.a, f"equal to the A of {group[0].name}")
                for p in group
                if id(p.pair.a) not in kept
            ]
            pairs[name] = _pair(adapter, joined, parameter, at, spelling, form)
            scales[name] = group[0].scale * adapter.weight * parameter.gain(spelling.layout)
    return replace(
        adapter,
        pairs=pairs,
        scales=scales,
        spelling=spelling,
        weight=1.0,
        unused=tuple(unused),
        notes=(*adapter.notes, *_summed(notes)),
    )


def _plain(placed: Placed, adapter: Adapter) -> Placed:
    """``placed`` with the scale that it has on plain values: MaxText's queries hold a factor."""
    stored = placed.parameter.values(adapter.spelling.layout, placed.at)
    return placed if stored.scale == 1 else replace(placed, scale=placed.scale / stored.scale)


def _require_factors(adapter: Adapter, placed: Mapping[str, Placed], form: Form) -> None:
    """Refuse what ``form`` has no place for."""
    left = [name for name in adapter.pairs if name not in placed]
    outside = [name for name in left if not names_text_parameter(name, adapter.spelling)]
    if left and (not outside or adapter.spelling.layout is not HF):
        raise no_module(adapter, left, "the base's text model")
    whole = next(iter(adapter.saved), None)
    if whole or outside:
        what = (
            f"it replaces {whole} as a whole"
            if whole
            else f"it changes {outside[0]}, outside the text model"
        )
        raise AdapterError(
            f"{adapter.source}: {what}, which an adapter of {form.name} has no place for",
            "merge it: gemma-convert surgery merge-lora",
        )
    for name, pair in placed.items():
        what = "" if pair.parameter.row.is_product else "factors of an embedding or of experts"
        if pair.pair.magnitude is not None and form is QWIX:
            what = "a DoRA magnitude"
        if what:
            raise AdapterError(
                f"{adapter.source}: {name}: {what}, which cannot be written for {form.name}",
                "merge it: gemma-convert surgery merge-lora",
            )


def _joined(adapter: Adapter, name: str, group: list[Placed]) -> tuple[_Group, str]:
    """The pairs of one target weight with one A and one rank, and a note of what that took."""
    first, layout = group[0], adapter.spelling.layout
    scaled = _scaled(group, first.scale)
    if all(same_values(first.pair.a, p.pair.a) for p in group[1:]):
        return _Group(tuple(group), first.pair.a, scaled, first.pair.rank), ""
    a = Joined(_widest([p.pair.a for p in group]), rank_axis(first, layout, 0))
    ranks = [p.pair.rank for p in group]
    total, before = sum(ranks), 0
    padded = []
    for placed, b in zip(group, scaled, strict=True):
        axis, rank = rank_axis(placed, layout, 1), placed.pair.rank
        sizes = (before, total - before - rank)
        left, right = (
            [Zeros((*b.shape[:axis], size, *b.shape[axis + 1 :]), b.dtype)] if size else []
            for size in sizes
        )
        padded.append(Joined([*left, b, *right], axis))
        before += rank
    parts = " + ".join(map(str, ranks))
    note = f"{name}: its parts have different A's, stacked to rank {parts} = {total}"
    return _Group(tuple(group), a, tuple(padded), total), note


def _pair(
    adapter: Adapter,
    group: _Group,
    parameter: Parameter,
    at: Mapping[str, int],
    spelling: Spelling,
    form: Form,
) -> Pair:
    sizes: dict[str, int] = {**parameter.sizes, RANK: group.rank}
    old = group.pairs[0].pair
    sources = old.form.patterns(parameter.row, adapter.spelling.layout)
    targets = form.patterns(parameter.row, spelling.layout)
    a = _relaid([Part(group.a, {})], sources[0], targets[0], {}, sizes)
    parts = [Part(b, p.at) for p, b in zip(group.pairs, group.b, strict=True)]
    joins = group.pairs[0].at.keys() - at.keys()
    if joins:
        parts += _silent(parameter, adapter.spelling.layout, parts, at)
    b = _relaid(parts, sources[1], targets[1], at, sizes)
    return Pair(a, b, (form,), old.experts, old.magnitude)


def _relaid(
    parts: list[Part],
    source: Pattern,
    target: Pattern,
    at: Mapping[str, int],
    sizes: Mapping[str, int],
) -> Tensor:
    if source == target and len(parts) == 1 and parts[0].at.keys() <= at.keys():
        return parts[0].tensor
    return Relaid(parts, source, target, at, sizes)


def _silent(
    parameter: Parameter, layout: Layout, parts: list[Part], at: Mapping[str, int]
) -> list[Part]:
    """B's of zero for the parts of a joined weight that the adapter leaves as they are."""
    b = parts[0].tensor
    taken = [part.at for part in parts]
    return [
        Part(Zeros(b.shape, b.dtype), place)
        for _, place in parameter.parts(layout)
        if agree(place, at) and place not in taken
    ]


def _scaled(group: list[Placed], scale: float) -> tuple[Tensor, ...]:
    """The B's multiplied so that all pairs have ``scale``; in float32 where that would round."""
    return _widest([multiplied(p.pair.b, p.scale / scale) for p in group])


def _widest(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors in one dtype that holds the values of all."""
    found = {tensor.dtype for tensor in tensors}
    dtype = found.pop() if len(found) == 1 else max(*found, _FLOAT32, key=lambda d: d.itemsize)
    return tuple(cast(tensor, dtype) for tensor in tensors)


def multiplied(tensor: Tensor, factor: float) -> Tensor:
    """``tensor`` times ``factor``; of 16 bits, in float32 unless it is the same numbers."""
    if factor == 1:
        return tensor
    change, wide = Affine(factor), max(tensor.dtype, _FLOAT32, key=lambda dtype: dtype.itemsize)
    return Revalued(tensor, AS_IT_IS, change, tensor.dtype if change.is_exact else wide)


def _summed(notes: list[str]) -> tuple[str, ...]:
    if not notes:
        return ()
    more = f", and so are {len(notes) - 1} more" if len(notes) > 1 else ""
    return (notes[0] + more,)


def bake(adapter: Adapter) -> Adapter:
    """``adapter`` with B multiplied by the scale, which becomes 1."""
    pairs = {
        name: replace(pair, b=multiplied(pair.b, adapter.scales[name]))
        for name, pair in adapter.pairs.items()
    }
    return replace(adapter, pairs=pairs, scales=dict.fromkeys(pairs, 1.0))
