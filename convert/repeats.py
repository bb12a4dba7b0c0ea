"""The stored tensors of a parameter, and what some layouts repeat where others keep it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.rows import Row
from gemma_convert.convert.tensor import Tensor, blocks


@dataclass(frozen=True)
class Part:
    """One stored tensor of a parameter: where it stands on the axes that its name spells."""

    tensor: Tensor
    at: Mapping[str, int]
    name: str = ""


def once(parts: Sequence[Part], row: Row, layout: Layout) -> tuple[list[Part], dict[str, str]]:
    """The parts of ``row`` without the copies that ``layout`` does not keep.

    Their values are read: only equal ones can become one.

    Returns:
        What is left, and the names of the copies with the reason why they are left out.

    Raises:
        LayoutError: If values that must be copies of each other differ.
    """
    axes = row.repeated - row.cell(layout).axes
    kept: dict[tuple[tuple[str, int], ...], Part] = {}
    copies: dict[str, str] = {}
    for part in parts:
        at = {axis: index for axis, index in part.at.items() if axis not in axes}
        first = kept.setdefault(tuple(at.items()), replace(part, at=at))
        if first.name != part.name:
            _require_equal(first, part, layout)
            copies[part.name] = f"equal to {first.name}: layout {layout.name} keeps one"
    return list(kept.values()), copies


def _require_equal(one: Part, other: Part, layout: Layout) -> None:
    for box in blocks(one.tensor):
        if one.tensor.read(box).tobytes() != other.tensor.read(box).tobytes():
            values = "" if one.tensor.shape else f" ({one.tensor.numpy()}, {other.tensor.numpy()})"
            raise LayoutError(
                f"{one.name} and {other.name} differ{values}, but layout {layout.name} has one "
                "tensor for both",
                "make them equal, or keep the checkpoint in a layout that has both",
            )
