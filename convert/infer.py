"""Guess family and size from names and shapes alone, where there is no config.json.

Orbax trees have no config. Their names tell the family's rows, their shapes the sizes of the
axes; a public model with the same sizes is named as the likely one. A guess is shown to people
and never used to convert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.pattern import Pattern
from gemma_convert.convert.rows import Family, Row


@dataclass(frozen=True)
class Guess:
    """What names and shapes say about a model.

    Attributes:
        families: Families whose rows explain the most names.
        layers: Number of layers seen.
        sizes: Axis to the sizes seen; axes of local and global layers may have two.
        models: Public models with these sizes.
    """

    families: tuple[str, ...]
    layers: int
    sizes: Mapping[str, tuple[int, ...]]
    models: tuple[str, ...]


@dataclass
class _Seen:
    names: set[str] = field(default_factory=set)
    layers: set[int] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    sizes: dict[str, set[int]] = field(default_factory=dict)


def guess(
    shapes: Mapping[str, tuple[int, ...]], spelling: Spelling, families: Mapping[str, Family]
) -> Guess:
    """Guess the model of tensors with these names and shapes.

    Args:
        shapes: Names in ``spelling``, without LoRA factors, to shapes.
        spelling: The layout of the names.
        families: Candidates.
    """
    seen = {name: _look(family, shapes, spelling) for name, family in families.items()}
    most = max(len(found.names) for found in seen.values())
    likely = [name for name, found in seen.items() if len(found.names) == most]
    complete = [name for name in likely if _has_every_row(families[name], seen[name])]
    chosen = tuple(complete or likely)
    found = seen[chosen[0]]
    layers = max(found.layers, default=-1) + 1
    models = tuple(
        name
        for family in chosen
        for name in families[family].models
        if _fits(read_public(families[family], name, families), layers, found)
    )
    sizes = {axis: tuple(sorted(values)) for axis, values in found.sizes.items()}
    return Guess(chosen, layers, sizes, models)


def weight_shape(
    name: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
    spelling: Spelling,
    families: Mapping[str, Family],
) -> tuple[int, ...] | None:
    """Shape of the weight ``name`` that LoRA factors of shapes ``a`` and ``b`` belong to.

    Returns:
        The shape, or None where no row has that name and number of axes.
    """
    short = name.removeprefix(spelling.prefix)
    for row in (row for family in families.values() for row in family.rows):
        if not row.has(spelling.layout) or not row.is_product:
            continue
        cell = row.cell(spelling.layout)
        inputs, outputs = row.factor_axes(spelling.layout)
        fits = len(a) == len(inputs) + 1 and len(b) == len(outputs) + 1
        if fits and cell.template.match(short) is not None:
            return cell.pattern.shape(dict(zip(inputs + outputs, a[:-1] + b[1:], strict=True)))
    return None


def read_public(family: Family, name: str, families: Mapping[str, Family]) -> Model:
    """The public model ``name`` of ``family``."""
    return read_model(family.config(name), families)


def _look(family: Family, shapes: Mapping[str, tuple[int, ...]], spelling: Spelling) -> _Seen:
    seen = _Seen()
    stacking = family.stacks.get(spelling.layout.name)
    named = {name.removeprefix(spelling.prefix): shape for name, shape in shapes.items()}
    for short, shape in (stacking.layers(named) if stacking else named).items():
        for row in family.rows:
            cell = row.cell(spelling.layout) if row.has(spelling.layout) else None
            index = cell.template.match(short) if cell is not None else None
            if cell is not None and index is not None and len(shape) == len(cell.pattern.groups):
                seen.names.add(short)
                seen.rows.add(row.name)
                seen.layers.update([index["i"]] if "i" in index else [])
                _note_sizes(seen, row, cell.pattern, shape)
    return seen


def _note_sizes(seen: _Seen, row: Row, pattern: Pattern, shape: tuple[int, ...]) -> None:
    for group, size in zip(pattern.groups, shape, strict=True):
        if len(group) == 1 and group[0] not in row.words:
            seen.sizes.setdefault(group[0], set()).add(size)


def _has_every_row(family: Family, seen: _Seen) -> bool:
    """Whether no row is missing that every model of the family has."""
    models = [read_public(family, name, {family.name: family}) for name in family.models]
    rows = [{p.row.name for p in model.parameters()} for model in models]
    return not rows or set.intersection(*rows) <= seen.rows


def _fits(model: Model, layers: int, seen: _Seen) -> bool:
    if len(model.layers) != layers:
        return False
    sizes: dict[str, set[int]] = {axis: {size} for axis, size in model.common.sizes.items()}
    for layer in model.layers:
        for axis, size in layer.sizes.items():
            sizes.setdefault(axis, set()).add(size)
    return all(found <= sizes.get(axis, set()) for axis, found in seen.sizes.items())
