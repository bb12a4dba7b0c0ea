"""The vocabulary of the family tables: rows, cells, layers, families. Data only.

A `Row` is one logical parameter of a family. It has one `Cell` a layout: how that layout names
the parameter and in which order it stores the axes. Nothing in a row has a direction: the same
two cells turn a Tunix checkpoint into a Hugging Face one and back, and tell where the factors of
a LoRA pair belong.

Axes of the Gemma family, as used in all tables:

    v vocabulary    d hidden size       f feed-forward size   c gate or up
    n query heads   k key/value heads   h head dimension      s query, key or value
    i layer         e experts           m feed-forward size of an expert
    l layers        p size of a layer's own embedding         w its vocabulary

Towers use these of themselves; their other letters are in `correspondence.AXES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gemma_convert.convert import pattern as patterns
from gemma_convert.convert import template as templates
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.pattern import Pattern
from gemma_convert.convert.presets.preset import Preset, hub_config
from gemma_convert.convert.stacking import Stacking
from gemma_convert.convert.template import Template
from gemma_convert.convert.values import AS_IT_IS, Affine


@dataclass(frozen=True)
class Layer:
    """What a row may ask of the layer it stands in.

    Attributes:
        index: Position in the stack.
        is_global: Full attention; else a sliding window.
        value_is_key: No value projection: the value is the key (Gemma 4 ``attention_k_eq_v``).
        shares_kv: It uses the keys and values of an earlier layer; nothing reads its own.
        is_moe: It has experts beside the MLP.
        has_ple: The model has per-layer embeddings.
        query_scale: What the model multiplies its queries by.
        sizes: Sizes of the axes in this layer.
        flags: Keys of a tower's config that are true, of those that its rows ask for.
    """

    index: int
    is_global: bool
    value_is_key: bool
    shares_kv: bool
    is_moe: bool
    has_ple: bool
    query_scale: float
    sizes: Mapping[str, int]
    flags: frozenset[str] = frozenset()


Where = Callable[[Layer], bool]

Values = Callable[[Layer, Mapping[str, int]], Affine]
"""How a layout stores the values of a parameter: by the layer, and by the place of the tensor on
the axes that its name spells."""

Gain = Callable[[Layer], float]
"""What a layout's layer multiplies the weight by before the product. A LoRA delta is added behind
that, so it is one of the scaled weight."""


def everywhere(layer: Layer) -> bool:
    """A row that stands in every layer."""
    return True


def nowhere(layer: Layer) -> bool:
    """The opposite of `everywhere`."""
    return False


def plainly(layer: Layer, at: Mapping[str, int]) -> Affine:
    """Values as Hugging Face has them."""
    return AS_IT_IS


def unscaled(layer: Layer) -> float:
    """A layer that multiplies by the weight as it is."""
    return 1.0


@dataclass(frozen=True)
class Cell:
    """A row in one layout: the template of its names, the pattern of its axes, its values.

    Attributes:
        template: Of its names.
        pattern: Of its axes.
        values: How they are stored.
        gain: See `Gain`.
    """

    template: Template
    pattern: Pattern
    values: Values = plainly
    gain: Gain = unscaled

    @property
    def axes(self) -> frozenset[str]:
        """Axes spelled by words in the name or present in the array; the layer is neither."""
        return frozenset(self.template.words) | frozenset(self.pattern.axes)


@dataclass(frozen=True)
class Row:
    """One logical parameter of a family.

    Attributes:
        name: Short name for messages and tables.
        cells: Layout name to cell; see `cell`.
        inputs: The axes contracted with the activations, in order. A LoRA pair of this row is
            A: inputs + r, B: r + the other axes, in the order of any layout's pattern. Empty where
            the parameter is not a matrix.
        stacked: The axes along which several matrices are stored as one, such as that of experts.
        lookup: Whether ids pick rows of the matrix, as of an embedding, instead of a product.
        where: Whether a layer has this parameter. A row outside the layers is asked with what all
            layers have in common.
        unread: Whether a layer has it but never reads it, so that it may be absent on the disk.
        per_layer: Whether there is one for each layer.
        repeated: Axes spelled by words that some layouts lack: these keep once what the others
            repeat. Copies are made of it, and must be equal to become one again.
    """

    name: str
    cells: Mapping[str, Cell]
    inputs: tuple[str, ...]
    where: Where
    unread: Where
    per_layer: bool
    repeated: frozenset[str] = frozenset()
    stacked: tuple[str, ...] = ()
    lookup: bool = False

    @property
    def is_product(self) -> bool:
        """Whether it is one matrix that activations are multiplied by: what Qwix adapts."""
        return bool(self.inputs) and not self.stacked and not self.lookup

    def has(self, layout: Layout) -> bool:
        """Whether ``layout`` has this parameter."""
        return layout.name in self.cells or layout.like in self.cells

    def cell(self, layout: Layout) -> Cell:
        """The cell of ``layout``: its own, else that of the layout it is like."""
        return self.cells.get(layout.name) or self.cells[layout.like]

    def factor_axes(self, layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes of a LoRA pair's A before r, and of its B behind r, in ``layout``'s order."""
        axes = self.cell(layout).pattern.axes
        inputs = tuple(axis for axis in axes if axis in self.inputs)
        apart = {*self.inputs, *self.stacked}
        return inputs, tuple(axis for axis in axes if axis not in apart)

    def only(self, where: Where) -> Row:
        """This row, in the layers that ``where`` picks."""
        return replace(self, where=where)

    def spelled(self, **cells: tuple[str, str]) -> Row:
        """This row, named or ordered otherwise in some layouts."""
        changed = {_key(layout): _cell(text, axes) for layout, (text, axes) in cells.items()}
        return replace(self, cells={**self.cells, **changed})

    def holding(self, **values: Values) -> Row:
        """This row, its values stored otherwise in some layouts."""
        return self._changed({layout: {"values": kind} for layout, kind in values.items()})

    def scaled(self, **gains: Gain) -> Row:
        """This row, its weight scaled by the layer of some layouts; see `Gain`."""
        return self._changed({layout: {"gain": gain} for layout, gain in gains.items()})

    def _changed(self, fields: Mapping[str, Mapping[str, Any]]) -> Row:
        """This row with other fields in the cells of some layouts."""
        cells = {
            _key(layout): replace(self.cells[_key(layout)], **changes)
            for layout, changes in fields.items()
        }
        return replace(self, cells={**self.cells, **cells})

    def may_lack(self, unread: Where) -> Row:
        """This row, absent or unread in the layers that ``unread`` picks."""
        return replace(self, unread=unread)

    @property
    def words(self) -> dict[str, int]:
        """Sizes of the axes that the model's dimensions do not give: those spelled by words, c."""
        spelled = {
            axis: len(words)
            for cell in self.cells.values()
            for axis, words in cell.template.words.items()
        }
        return {"c": 2, **spelled}


def row(
    name: str,
    *,
    inputs: str = "",
    where: Where = everywhere,
    unread: Where = nowhere,
    repeated: str = "",
    stacked: str = "",
    lookup: bool = False,
    **cells: tuple[str, str],
) -> Row:
    """Make a row from plain text: ``row("q", inputs="d", hf=("...", "(n h) d"), tunix=...)``.

    Raises:
        LayoutError: If the cells do not name the same axes, or only some of them name a layer.
    """
    parsed = {_key(layout): _cell(text, axes) for layout, (text, axes) in cells.items()}
    once = frozenset(repeated.split())
    if len({cell.axes - once for cell in parsed.values()}) != 1:
        listed = ", ".join(f"{layout} {sorted(cell.axes)}" for layout, cell in parsed.items())
        raise LayoutError(f"row {name}: the layouts name different axes ({listed})")
    layered = {"{i}" in text for text, _ in cells.values()}
    if len(layered) != 1:
        raise LayoutError(f"row {name}: {{i}} stands in some layouts only")
    return Row(
        name,
        parsed,
        tuple(inputs.split()),
        where,
        unread,
        layered.pop(),
        stacked=tuple(stacked.split()),
        lookup=lookup,
        repeated=once,
    )


def _key(layout: str) -> str:
    """A layout's name from a keyword, which cannot hold a hyphen."""
    return layout.replace("_", "-")


def _cell(text: str, axes: str) -> Cell:
    return Cell(templates.parse(text), patterns.parse(axes))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that belong together.

    Attributes:
        name: ``gemma3``, ``siglip``, ...
        rows: Its parameters.
        stacks: Layout name to how that layout stacks layers, where it does.
    """

    name: str
    rows: tuple[Row, ...]
    stacks: Mapping[str, Stacking] = field(default_factory=dict)

    def named(self, name: str, layout: Layout) -> Iterator[tuple[Row, int]]:
        """The rows to which ``layout`` gives this name, and how many axes are stacked there."""
        stacking = self.stacks.get(layout.name)
        in_layer = stacking.in_layer(name) if stacking else [(name, 0)]
        for row in self.rows:
            if row.has(layout):
                template = row.cell(layout).template
                for candidate, axes in in_layer if row.per_layer else [(name, 0)]:
                    if template.match(candidate) is not None:
                        yield row, axes


@dataclass(frozen=True, kw_only=True)
class Tower(Table):
    """All rows of the part of a model that looks or listens, projection to the text included.

    Attributes:
        part: ``vision`` or ``audio``; config.json describes it under ``<part>_config``.
        model_types: The ``model_type`` values there that mean this tower.
        defaults: Values that transformers assumes when that config leaves them out.
        sizes: Sizes of the axes, by that config and the hidden size of the text model.
        flags: Keys there by whose truth the tower has more parameters.
        shortened: What Hugging Face names begin with on the Hub, and with what instead where
            transformers 5 saved them.
    """

    part: str
    model_types: tuple[str, ...]
    defaults: Mapping[str, Any]
    sizes: Callable[[Mapping[str, Any], int], Mapping[str, int]]
    flags: tuple[str, ...] = ()
    shortened: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Family(Table):
    """All rows of one generation of models.

    Attributes:
        model_types: The ``model_type`` values of config.json that mean this family.
        defaults: Values of config keys that transformers assumes when config.json leaves them out;
            RoPE's in the form that the family reads, and ``layers_per_global`` where no key of
            config.json tells the period of global layers.
        unsupported: Config keys whose truth means parameters that these rows do not have, each
            with what it is.
        nested_prefix: What names of the text model begin with on the Hub where there are towers.
        models: Named sizes: the text config's keys that tell them apart.
        presets: The whole configs of named models; a name may have sizes alone.
        own_defaults: What some of the model_types assume otherwise than ``defaults`` says.
        towers: The vision and audio parts that its models may have.
    """

    model_types: tuple[str, ...]
    defaults: Mapping[str, Any]
    unsupported: Mapping[str, str]
    nested_prefix: str
    models: Mapping[str, Mapping[str, Any]]
    own_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    towers: tuple[Tower, ...] = ()

    def config(self, name: str) -> dict[str, Any]:
        """The config of the public model ``name`` with all its parts, or its sizes alone."""
        if name in self.presets:
            return hub_config(self.presets[name], multimodal=True)
        return {"model_type": self.model_types[0], **self.models[name]}
