"""The correspondence tables, written out: what each layout calls each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemma_convert.convert.layouts import LAYOUTS, Layout
from gemma_convert.convert.model import Model
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.registry import families, named_model

AXES = {
    "v": "vocabulary",
    "d": "hidden size",
    "n": "query heads",
    "k": "key/value heads",
    "h": "head dimension",
    "f": "feed-forward size",
    "s": "query, key or value",
    "c": "gate or up",
    "e": "experts",
    "m": "feed-forward size of an expert",
    "l": "layers",
    "p": "size of a layer's own embedding",
    "w": "vocabulary of the layers' own embeddings",
}
"""What the axis letters mean."""


def model_rows(model: Model) -> list[tuple[Parameter, str]]:
    """The rows of ``model``, each as the first parameter of it and the layers that have it."""
    layers: dict[int, list[int]] = {}
    first: dict[int, Parameter] = {}
    for parameter in model.parameters():
        first.setdefault(id(parameter.row), parameter)
        found = layers.setdefault(id(parameter.row), [])
        if parameter.index is not None:
            found.append(parameter.index)
    count = len(model.layers)
    return [
        (parameter, "all" if len(layers[key]) == count else _spans(layers[key]))
        for key, parameter in first.items()
    ]


def table(model: Model) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of one model: parameter, layers, one column a layout."""
    rows = model_rows(model)
    layouts = [
        layout
        for layout in LAYOUTS.values()
        if any(layout.name in parameter.row.cells for parameter, _ in rows)
    ]
    header = ["parameter", "layers", *(layout.name for layout in layouts)]
    lines = [
        [parameter.row.name, where, *(_cell(parameter, layout) for layout in layouts)]
        for parameter, where in rows
    ]
    return header, lines


def stacks(model: Model) -> list[str]:
    """How layouts that stack layers do it, a sentence a layout."""
    found = []
    for name, stacking in model.family.stacks.items():
        if refusal := stacking.refusal(model.common):
            found.append(f"{name}: not for this model: {refusal}.")
            continue
        places = ", ".join(
            f"`{place.name}`" + (f" ({' '.join(place.axes)})" if place.axes else "")
            for place in stacking.places
        )
        found.append(f"{name}, stacked at axis {stacking.axis}: {places}.")
    return found


def markdown() -> str:
    """All tables as one Markdown document; ``docs/layouts.md`` is this text."""
    parts = [
        "# Layouts",
        "Made by `gemma-convert layouts --markdown` from the rows in `convert/families/`.",
        "A cell is a name and, behind it, the axes of the array in memory order; `{i}` is the "
        "layer, `{s:k_proj,v_proj}` an axis that the name spells, brackets one dimension made of "
        "several axes. Names stand behind a prefix that differs between wrappers of a layout. "
        "Where a layout stores other values than Hugging Face, how it makes them stands behind the "
        "axes. A layout that stacks layers has them in blocks of a period, the last of which is "
        "global: b is the block, j the layer in it, path the name behind that of the layer.",
        _markdown_table(["axis", "meaning"], [[f"`{a}`", text] for a, text in AXES.items()]),
        "Prefixes: " + "; ".join(f"{x.name} {_quoted(x.prefixes)}" for x in LAYOUTS.values()) + ".",
    ]
    for family in families().values():
        parts.append(f"## {family.name}")
        parts.append("Models: " + ", ".join(family.models) + ".")
        for name in _telling(family.models):
            header, lines = table(named_model(name))
            quoted = [[*line[:2], *(f"`{c}`" if c else "" for c in line[2:])] for line in lines]
            parts += [f"### {name}", _markdown_table(header, quoted)]
            parts += stacks(named_model(name))
    return "\n\n".join(parts) + "\n"


def _telling(models: Iterable[str]) -> list[str]:
    """Models whose rows differ from those before them."""
    seen: set[tuple[int, ...]] = set()
    found: list[str] = []
    for name in models:
        rows = tuple(id(parameter.row) for parameter, _ in model_rows(named_model(name)))
        if rows not in seen:
            seen.add(rows)
            found.append(name)
    return found


def _cell(parameter: Parameter, layout: Layout) -> str:
    if not parameter.row.has(layout):
        return ""
    cell = parameter.row.cell(layout)
    values = parameter.values(layout, {})
    scaled = f", * {values.scale:.6g}" if values.scale != 1 else ""
    moved = f", + {values.offset:g}" if values.offset else ""
    return f"{cell.template.text}: {cell.pattern.text}{scaled}{moved}"


def _spans(numbers: Sequence[int]) -> str:
    """``0-4, 6`` for 0, 1, 2, 3, 4, 6."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)


def _markdown_table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _quoted(prefixes: Iterable[str]) -> str:
    return ", ".join(f"`{prefix}`" if prefix else "none" for prefix in prefixes)
