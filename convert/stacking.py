"""Layouts that keep several layers in one array: in which array, and where in it.

Layers repeat in blocks: layer i is layer j = i % period of block b = i // period. A `Place` tells
for some of the layers the name of the array and which of b and j are axes of it; the same place
writes names and reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

MOST_LAYERS = 10_000
"""A model that has more is damaged, or hostile."""

_NUMBER = "(?:0|[1-9][0-9]{0,8})"


@dataclass(frozen=True)
class Place:
    """Where some of the layers are kept.

    Attributes:
        name: What the array is called: ``{b}`` and ``{j}`` as above, ``{path}`` the name behind
            the layer's own; or ``{head}`` the first key of that and ``{tail}`` the others.
        axes: Which of b and j are axes of the array, outermost first.
        words: What ``{j}`` is called where it is not a number.
        blocks: Whether it keeps all layers, those of whole blocks, or those after the last one.
        positions: Whether it keeps all layers of a block, all but the last, or the last.
    """

    name: str
    axes: str = ""
    words: tuple[str, ...] = ()
    blocks: Literal["all", "whole", "rest"] = "all"
    positions: Literal["all", "inner", "last"] = "all"

    def keeps(self, b: int, j: int, whole_blocks: int, period: int) -> bool:
        """Whether layer ``j`` of block ``b`` is kept here."""
        block = {"all": True, "whole": b < whole_blocks, "rest": b >= whole_blocks}
        position = {"all": True, "inner": j < period - 1, "last": j == period - 1}
        return block[self.blocks] and position[self.positions]

    def spell(self, b: int, j: int, path: str) -> str:
        """The name of the array that holds parameter ``path`` of layer ``j`` of block ``b``."""
        head, _, tail = path.partition("/")
        position = self.words[j] if self.words else j
        return self.name.format(b=b, j=position, path=path, head=head, tail=tail)

    def read(self, name: str) -> tuple[str, dict[str, int]] | None:
        """The parameter that the array ``name`` holds, and which of b and j the name tells."""
        found = _regex(self).fullmatch(name)
        if found is None:
            return None
        parts = found.groupdict()
        path = parts["path"] if "path" in parts else f"{parts['head']}/{parts['tail']}"
        told = {axis: parts[axis] for axis in "bj" if axis in parts}
        return path, {
            axis: self.words.index(text) if axis == "j" and self.words else int(text)
            for axis, text in told.items()
        }


@dataclass(frozen=True)
class Slot:
    """Where one layer's tensor lies: in which array, and at which index of the stacked axes."""

    name: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class Stacking:
    """How a layout stacks the layers of a family.

    Attributes:
        layer: What a layer's parameters begin with in the layout's cells, with ``{i}``.
        places: Where the layers are kept.
        axis: Where in the array the stacked axes stand; at the end where it has fewer.
        period: Layers of a block; None where the model's first global layer ends one.
        refusal: Why a model, by what its layers have in common, cannot be stacked; else empty.
    """

    layer: str
    places: tuple[Place, ...]
    axis: int = 0
    period: int | None = None
    refusal: Callable[[Any], str] = lambda layer: ""

    def slot(self, name: str, index: int, count: int, period: int) -> Slot | None:
        """Where the tensor ``name`` of layer ``index`` of ``count`` lies; None if in no layer."""
        beginning = self.layer.format(i=index)
        if not name.startswith(beginning):
            return None
        b, j = divmod(index, period)
        place = next(p for p in self.places if p.keeps(b, j, count // period, period))
        at = {"b": b, "j": j}
        return Slot(
            place.spell(b, j, name.removeprefix(beginning)), tuple(at[axis] for axis in place.axes)
        )

    def in_layer(self, name: str) -> list[tuple[str, int]]:
        """What ``name`` may be called in a layer, each with the number of its stacked axes."""
        found = [(place.read(name), len(place.axes)) for place in self.places]
        return [(self.layer.format(i=0) + read[0], axes) for read, axes in found if read]

    def layers(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Names and shapes a layer, of arrays of which only names and shapes are known."""
        read = [
            (name, place, *found)
            for name in shapes
            for place in self.places
            if (found := place.read(name))
        ]
        period = self.period or 1 + max((told.get("j", 0) for *_, told in read), default=0)
        made = {name: shape for name, shape in shapes.items() if name not in {r[0] for r in read}}
        whole = 0  # blocks seen so far; what lies after the last one comes last
        for name, place, path, told in sorted(read, key=lambda found: found[1].blocks == "rest"):
            axis = min(self.axis, len(shapes[name]) - len(place.axes))
            sizes = dict(zip(place.axes, shapes[name][axis:], strict=False))
            blocks = range(sizes["b"]) if "b" in sizes else (told.get("b", whole),)
            inner = range(sizes["j"]) if "j" in sizes else (told.get("j", period - 1),)
            if place.blocks != "rest":
                whole = max(whole, len(blocks), 1 + blocks[-1] if blocks else 0)
            shape = shapes[name][:axis] + shapes[name][axis + len(place.axes) :]
            if len(blocks) * len(inner) <= MOST_LAYERS:
                numbers = [b * period + j for b in blocks for j in inner]
                made |= {self.layer.format(i=i) + path: shape for i in numbers}
        return made


@cache
def _regex(place: Place) -> re.Pattern[str]:
    fields = {
        "b": _NUMBER,
        "j": "|".join(place.words) or _NUMBER,
        "path": ".+",
        "head": "[^/]+?",
        "tail": ".+",
    }
    text = re.escape(place.name)
    for field, pattern in fields.items():
        text = text.replace(rf"\{{{field}\}}", f"(?P<{field}>{pattern})")
    return re.compile(text)
