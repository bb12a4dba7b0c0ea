"""The registry: which families are known, and which layout a set of names is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.layouts import LAYOUTS, Spelling
from gemma_convert.convert.rows import Family


@cache
def families() -> Mapping[str, Family]:
    """The families known, by name."""
    from gemma_convert.convert.families import gemma1, gemma2, gemma3, gemma4

    return {module.FAMILY.name: module.FAMILY for module in (gemma1, gemma2, gemma3, gemma4)}


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
        templates = {
            row.cells[layout.name].template
            for family in families().values()
            for row in family.rows
            if layout.name in row.cells
        }
        for prefix in layout.prefixes:
            matched = [
                name
                for name in listed
                if name.startswith(prefix)
                and any(t.match(name.removeprefix(prefix)) is not None for t in templates)
            ]
            if matched:
                example = matched[len(matched) // 2]
                spelling = Spelling(layout, prefix)
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
