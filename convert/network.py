"""Parameters with sizes: the rows of a table at the dimensions of one config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.rows import Layer, Row, Table
from gemma_convert.convert.values import Affine


@dataclass(frozen=True)
class Parameter:
    """A row at one place of one model: a logical parameter whose axes have sizes.

    Attributes:
        row: Its names and axis orders.
        index: The layer, or None outside the layers.
        layer: The layer it stands in, or what all layers have in common.
        sizes: Sizes of all axes.
        unread: The model never reads it, so it may be absent.
    """

    row: Row
    index: int | None
    layer: Layer
    sizes: Mapping[str, int]
    unread: bool = False

    def parts(self, layout: Layout) -> list[tuple[str, dict[str, int]]]:
        """The tensors that hold it in ``layout``.

        Returns:
            Name (without the spelling's prefix) and, for each axis that the name spells by a word,
            the position it stands for; in the order of that axis.
        """
        template = self.row.cell(layout).template
        layer = {} if self.index is None else {"i": self.index}
        spelled: list[dict[str, int]] = [{}]
        for axis, words in template.words.items():
            spelled = [{**at, axis: i} for at in spelled for i in range(len(words))]
        return [(template.format({**layer, **at}), at) for at in spelled]

    def shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape of each of those tensors."""
        return self.row.cell(layout).pattern.shape(self.sizes)

    def values(self, layout: Layout, at: Mapping[str, int]) -> Affine:
        """How ``layout`` stores the values of the tensor at that place on the spelled axes."""
        return self.row.cell(layout).values(self.layer, at)

    def gain(self, layout: Layout) -> float:
        """What ``layout``'s layer multiplies the weight by before the product."""
        return self.row.cell(layout).gain(self.layer)

    def __str__(self) -> str:
        return self.row.name if self.index is None else f"{self.row.name} of layer {self.index}"


@dataclass(frozen=True)
class Network:
    """The rows of a table at the dimensions of one config: a text model, or a tower.

    Attributes:
        family: Its rows.
        layers: What each layer is, with the sizes of its axes.
        common: What all layers have in common, with the sizes of the axes outside the layers.
        origin: Who says so, for messages: config.json, or the option that named a public model.
    """

    family: Table
    layers: tuple[Layer, ...]
    common: Layer
    origin: str = field(default="config.json", kw_only=True)

    def parameters(self) -> list[Parameter]:
        """Every logical parameter: those outside the layers, then layer by layer."""
        outside = [row for row in self.family.rows if not row.per_layer]
        inside = [row for row in self.family.rows if row.per_layer]
        found = [_parameter(row, self.common) for row in outside if row.where(self.common)]
        for layer in self.layers:
            found += [_parameter(row, layer) for row in inside if row.where(layer)]
        return found

    def is_in(self, layout: Layout) -> bool:
        """Whether ``layout`` has a name for every parameter."""
        return all(parameter.row.has(layout) for parameter in self.parameters())


def _parameter(row: Row, layer: Layer) -> Parameter:
    index = layer.index if row.per_layer else None
    return Parameter(row, index, layer, {**layer.sizes, **row.words}, row.unread(layer))
