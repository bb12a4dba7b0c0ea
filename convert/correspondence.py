"""The correspondence tables, written out: what each layout calls each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemma_convert.convert.layouts import LAYOUTS, Layout
from gemma_convert.convert.model import Model
from gemma_convert.convert.network import Network, Parameter
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

TOWER_AXES = {
    "t": "hidden size of the text model",
    "u": "positions: patches of an image, or places on one of its sides",
    "g": "row or column of a patch",
    "a": "values of a patch",
    "y": "height of a convolution",
    "x": "width of a convolution",
    "o": "channels: colours of an image, or of the first convolution",
    "z": "channels of the second convolution",
    "q": "frequencies behind both convolutions",
    "ch": "channels of a conformer's convolution",
    "tap": "its length",
    "j": "output size of the audio tower",
    "b": "which clip bound",
}
"""What more there is in towers; there d, n, k, h and f are those of the tower."""


def model_rows(model: Network) -> list[tuple[Parameter, str]]:
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


def table(model: Network) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of one model: parameter, layers, one column a layout."""
    rows = model_rows(model)
    layouts = [
        layout
        for layout in LAYOUTS.values()
        if any(layout.name in parameter.row.cells for parameter, _ in rows) and model.is_in(layout)
    ]
    header = ["parameter", "layers", *(layout.name for layout in layouts)]
    lines = [
        [parameter.row.name, where, *(_cell(parameter, layout) for layout in layouts)]
        for parameter, where in rows
    ]
    return header, lines


def stacks(model: Network) -> list[str]:
    """How layouts that stack layers do it, a sentence a layout."""
    found: list[str] = []
    for name, stacking in model.family.stacks.items():
        if refusal := stacking.refusal(model.common):
            found.append(f"{name}: not for this model: {refusal}.")
            continue
        places = ", ".join(
            f"`{place.name}`" + (f" ({' '.join(place.axes)})" if place.axes else "")
            for place in stacking.places
        )
        stacked = any(place.axes for place in stacking.places)
        how = f"stacked at axis {stacking.axis}" if stacked else "not stacked, in blocks"
        found.append(f"{name}, {how}: {places}.")
    return found


def parts(title: str, model: Model) -> dict[str, Network]:
    """The text model and the towers of ``model``, each under what it is, behind ``title``."""
    return {title: model, **{f"{title}: {what}": tower for what, tower in towers(model).items()}}


def model_markdown(title: str, model: Model) -> str:
    """The tables of one model as Markdown."""
    found = parts(title, model).items()
    blocks = [block for what, part in found for block in (f"## {what}", *_written(part))]
    return "\n\n".join(blocks) + "\n"


def markdown() -> str:
    """All tables as one Markdown document; ``docs/layouts.md`` is this text."""
    written = [
        "# Layouts",
        "Made by `gemma-convert layouts --markdown` from the rows in `convert/families/`.",
        "A cell is a name and, behind it, the axes of the array in memory order; `{i}` is the "
        "layer, `{s:k_proj,v_proj}` an axis that the name spells, brackets one dimension made of "
        "several axes. Names stand behind a prefix that differs between wrappers of a layout. "
        "Where a layout stores other values than Hugging Face, how it makes them stands behind the "
        "axes. Where several words of Hugging Face stand beside one name that has no such axis, "
        "the tensors are copies of each other. A layout that stacks layers has them in blocks of a "
        "period, the last of which is global: b is the block, j the layer in it, path the name "
        "behind that of the layer.",
        _markdown_table(
            ["axis", "meaning"], [[f"`{a}`", text] for a, text in {**AXES, **TOWER_AXES}.items()]
        ),
        "Prefixes: " + "; ".join(f"{x.name} {_quoted(x.prefixes)}" for x in LAYOUTS.values()) + ".",
    ]
    for family in families().values():
        written.append(f"## {family.name}")
        written.append("Models: " + ", ".join(family.models) + ".")
        for name in _telling(family.models):
            written += [f"### {name}", *_written(named_model(name))]
        for title, tower in _towers(family.models).items():
            written += [f"### {title}", *_written(tower)]
    return "\n\n".join(written) + "\n"


def _written(model: Network) -> list[str]:
    """The table of a model or a tower in Markdown, and how its layers are stacked."""
    header, lines = table(model)
    quoted = [[*line[:2], *(f"`{c}`" if c else "" for c in line[2:])] for line in lines]
    return [_markdown_table(header, quoted), *stacks(model)]


def towers(model: Model) -> dict[str, Network]:
    """The towers of a model by what they are."""
    return {
        f"{config.tower.part} tower, {config.tower.name}": config.network()
        for config in model.towers
    }


def _towers(models: Iterable[str]) -> dict[str, Network]:
    """The towers of some models, one of every kind, by what they are and in which models."""
    seen: dict[tuple[int, ...], tuple[str, Network, list[str]]] = {}
    for name in models:
        for title, tower in towers(named_model(name)).items():
            rows = tuple(id(parameter.row) for parameter, _ in model_rows(tower))
            seen.setdefault(rows, (title, tower, []))[2].append(name)
    return {f"{title}: {', '.join(names)}": tower for title, tower, names in seen.values()}


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
