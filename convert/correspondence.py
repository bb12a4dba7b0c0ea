"""The correspondence tables, written out: what each layout calls each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemma_convert.convert.layouts import LAYOUTS
from gemma_convert.convert.model import Model
from gemma_convert.convert.registry import families, named_model
from gemma_convert.convert.rows import Row

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


def model_rows(model: Model) -> list[tuple[Row, str]]:
    """The rows of ``model``, each with the layers that have it, such as ``all`` or ``0-4, 6``."""
    layers: dict[int, list[int]] = {}
    rows: dict[int, Row] = {}
    for parameter in model.parameters():
        rows[id(parameter.row)] = parameter.row
        found = layers.setdefault(id(parameter.row), [])
        if parameter.index is not None:
            found.append(parameter.index)
    count = len(model.layers)
    return [
        (row, "all" if len(layers[key]) == count else _spans(layers[key]))
        for key, row in rows.items()
    ]


def table(model: Model) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of one model: parameter, layers, one column a layout."""
    header = ["parameter", "layers", *LAYOUTS]
    lines = [
        [row.name, layers, *(_cell(row, layout) for layout in LAYOUTS)]
        for row, layers in model_rows(model)
    ]
    return header, lines


def markdown() -> str:
    """All tables as one Markdown document; ``docs/layouts.md`` is this text."""
    parts = [
        "# Layouts",
        "Made by `gemma-convert layouts --markdown` from the rows in `convert/families/`.",
        "A cell is a name and, behind it, the axes of the array in memory order; `{i}` is the "
        "layer, `{s:k_proj,v_proj}` an axis that the name spells, brackets one dimension made of "
        "several axes. Names stand behind a prefix that differs between wrappers of a layout.",
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
    return "\n\n".join(parts) + "\n"


def _telling(models: Iterable[str]) -> list[str]:
    """Models whose rows differ from those before them."""
    seen: set[tuple[int, ...]] = set()
    found: list[str] = []
    for name in models:
        rows = tuple(id(row) for row, _ in model_rows(named_model(name)))
        if rows not in seen:
            seen.add(rows)
            found.append(name)
    return found


def _cell(row: Row, layout: str) -> str:
    cell = row.cells.get(layout)
    return "" if cell is None else f"{cell.template.text}: {cell.pattern.text}"


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
