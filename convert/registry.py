"""The registry: which families are known, and which layout a set of names is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError, LayoutError
from gemma_convert.convert.layouts import LAYOUTS, Layout, Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.rows import Cell, Family
from gemma_convert.convert.tensor import Tensor

ENTRY_POINTS = "gemma_convert.families"
"""Group of the entry points by which other packages register families."""


@cache
def families() -> Mapping[str, Family]:
    """The families known, by name: ours, then those that installed packages register.

    Raises:
        ConfigError: If an entry point is not a `Family`, or takes a name that is taken.
    """
    from gemma_convert.convert.families import gemma1, gemma2, gemma3, gemma4

    found = {module.FAMILY.name: module.FAMILY for module in (gemma1, gemma2, gemma3, gemma4)}
    for entry in entry_points(group=ENTRY_POINTS):
        family = entry.load()
        if not isinstance(family, Family) or family.name in found:
            raise ConfigError(
                f"entry point {entry.name} = {entry.value} is not a family of a new name",
                "let it name a gemma_convert.convert.rows.Family, or uninstall its package",
            )
        found[family.name] = family
    return found


def named_model(name: str) -> Model:
    """The public model of that name, such as ``gemma-4-31b``.

    Raises:
        ConfigError: If it is not known.
    """
    for family in families().values():
        if name.lower() in family.models:
            return read_model(family.config(name.lower()), families())
    known = ", ".join(model for family in families().values() for model in family.models)
    raise ConfigError(f"no public model {name!r} is known", f"known: {known}")


@dataclass(frozen=True)
class Evidence:
    """How well a spelling explains a set of names."""

    spelling: Spelling
    matched: int
    total: int
    example: str

    def __str__(self) -> str:
        return f"{self.matched} of {self.total} names, such as {self.example}"


def explain(names: Iterable[str]) -> list[Evidence]:
    """Every spelling that explains some of ``names``, the one that explains most first."""
    listed = list(names)
    found: list[Evidence] = []
    for layout in LAYOUTS.values():
        for prefix in layout.prefixes:
            spelling = Spelling(layout, prefix)
            matched = [name for name in listed if _cells(normal(name, layout), spelling)]
            if matched:
                example = matched[len(matched) // 2]
                found.append(Evidence(spelling, len(matched), len(listed), example))
    return sorted(found, key=lambda evidence: -evidence.matched)


def detect(names: Iterable[str], where: str) -> Spelling:
    """The spelling that ``names`` are in.

    Args:
        names: Tensor names of one checkpoint.
        where: The checkpoint, for the message.

    Raises:
        LayoutError: If no known layout explains any of them.
    """
    listed = list(names)
    found = explain(listed)
    if not found:
        example = f"such as {listed[0]}" if listed else "there are none"
        raise LayoutError(
            f"{where}: the tensor names fit no known layout ({example})",
            f"known: {', '.join(LAYOUTS)}; see `gemma-convert inspect {where}`",
        )
    return found[0].spelling


def recognise(checkpoint: Checkpoint) -> tuple[Checkpoint, Spelling]:
    """The spelling of a checkpoint, and the checkpoint with names as the templates write them.

    Raises:
        LayoutError: If no known layout explains the names.
    """
    spelling = detect(checkpoint, checkpoint.source)
    tensors = {_as_written(name, t, spelling): t for name, t in checkpoint.items()}
    return checkpoint.replace(tensors=tensors), spelling


def normal(name: str, layout: Layout) -> str:
    """``name`` with the layout's separator between its keys."""
    return name if layout.separator == "." else name.replace(".", layout.separator)


def _as_written(name: str, tensor: Tensor, spelling: Spelling) -> str:
    """The name that a template gives this tensor, where an optional last key makes several."""
    layout = spelling.layout
    name = normal(name, layout)
    leaf = layout.separator + layout.optional_leaf
    names = [name, name.removesuffix(leaf), name + leaf] if layout.optional_leaf else [name]
    for candidate in names:
        cells = _cells(candidate, spelling)
        if any(len(cell.pattern.groups) == len(tensor.shape) for cell in cells):
            return candidate
    return name


def _cells(name: str, spelling: Spelling) -> list[Cell]:
    """The cells of all families whose template gives ``name``."""
    if not name.startswith(spelling.prefix):
        return []
    short = name.removeprefix(spelling.prefix)
    return [
        cell for cell in _all_cells(spelling.layout.name) if cell.template.match(short) is not None
    ]


@cache
def _all_cells(layout: str) -> tuple[Cell, ...]:
    rows = (row for family in families().values() for row in family.rows)
    return tuple(dict.fromkeys(row.cells[layout] for row in rows if layout in row.cells))
