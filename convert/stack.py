"""Take stacked arrays apart into layers, and stack layers, lazily; see `stacking` for the rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.network import Network
from gemma_convert.convert.stacking import Slot, Stacking
from gemma_convert.convert.tensor import Array, Box, Tensor, Zeros

Index = tuple[int, ...]


class Slice(Tensor):
    """One layer of a stacked array.

    Args:
        parent: The array.
        axis: Its first stacked axis.
        index: The layer's place on the stacked axes.
    """

    action = "rearranged"

    def __init__(self, parent: Tensor, axis: int, index: Index) -> None:
        self.parent = parent
        self.axis = axis
        self.index = index
        self.shape = parent.shape[:axis] + parent.shape[axis + len(index) :]
        self.dtype = parent.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.parent,)

    def read(self, box: Box) -> Array:
        place = tuple((i, i + 1) for i in self.index)
        array = self.parent.read((*box[: self.axis], *place, *box[self.axis :]))
        return array.reshape([stop - start for start, stop in box])


class Stacked(Tensor):
    """Layers of one shape and dtype in one array.

    Args:
        layers: Place on the stacked axes to tensor; every place of a grid.
        axis: The first stacked axis.
    """

    action = "rearranged"

    def __init__(self, layers: Mapping[Index, Tensor], axis: int) -> None:
        self.layers = layers
        self.axis = axis
        self.counts = tuple(max(places) + 1 for places in zip(*layers, strict=True))
        one = next(iter(layers.values()))
        self.shape = one.shape[:axis] + self.counts + one.shape[axis:]
        self.dtype = one.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return tuple(self.layers.values())

    @property
    def stacked_axes(self) -> frozenset[int]:
        return frozenset(range(self.axis, self.axis + len(self.counts)))

    @property
    def wide(self) -> Tensor:
        return Stacked({place: tensor.wide for place, tensor in self.layers.items()}, self.axis)

    def read(self, box: Box) -> Array:
        end = self.axis + len(self.counts)
        inner = (*box[: self.axis], *box[end:])
        array = np.empty([stop - start for start, stop in box], self.dtype)
        for place in product(*(range(start, stop) for start, stop in box[self.axis : end])):
            at = tuple(i - start for i, (start, _) in zip(place, box[self.axis : end], strict=True))
            array[(slice(None),) * self.axis + at] = self.layers[place].read(inner)
        return array


def stacking_of(model: Network, spelling: Spelling) -> Stacking | None:
    """How ``spelling``'s layout stacks the layers of ``model``; None if it does not.

    Raises:
        LayoutError: If it cannot, for this model.
    """
    stacking = model.family.stacks.get(spelling.layout.name)
    if stacking is None:
        return None
    refusal = stacking.refusal(model.common)
    kinds, block = [layer.is_global for layer in model.layers], period(model, stacking)
    if not refusal and any(kind != kinds[i % block] for i, kind in enumerate(kinds)):
        refusal = "its local and global layers do not repeat in blocks"
    if refusal:
        raise LayoutError(
            f"layout {spelling.layout.name} cannot hold this {model.family.name}: {refusal}",
            f"use layout {spelling.layout.unstacked}"
            if spelling.layout.unstacked
            else "use another",
        )
    return stacking


def period(model: Network, stacking: Stacking) -> int:
    """Layers of a block, which ends with a global one; more than there are if none is."""
    if stacking.period is not None:
        return stacking.period
    count = len(model.layers)
    return next((i for i, layer in enumerate(model.layers) if layer.is_global), count) + 1


def unstacked(checkpoint: Checkpoint, model: Network, spelling: Spelling) -> Checkpoint:
    """``checkpoint`` with a tensor a layer, named as the cells of ``spelling``'s layout do.

    Raises:
        LayoutError: If an array does not hold as many layers as the model has there.
    """
    stacking = stacking_of(model, spelling)
    if stacking is None:
        return checkpoint
    found = dict(slots(model, spelling, stacking))
    counts: dict[str, Index] = {}
    for slot in found.values():
        seen = counts.get(slot.name, (0,) * len(slot.index))
        counts[slot.name] = tuple(max(n, i + 1) for n, i in zip(seen, slot.index, strict=True))
    tensors = {name: t for name, t in checkpoint.items() if name not in counts}
    for name, slot in found.items():
        if slot.name in checkpoint:
            array = checkpoint[slot.name]
            axis = _axis(stacking, len(array.shape) - len(slot.index))
            _require_layers(checkpoint, slot.name, axis, counts[slot.name], model.origin)
            tensors[name] = Slice(array, axis, slot.index) if slot.index else array
    return checkpoint.replace(tensors=tensors)


def stacked(
    checkpoint: Checkpoint, model: Network, spelling: Spelling, *, partial: bool = False
) -> Checkpoint:
    """The opposite of `unstacked`.

    Args:
        checkpoint: A tensor a layer.
        model: Its dimensions.
        spelling: How it is named.
        partial: Whether layers may be absent; they are zero then.

    Raises:
        LayoutError: If the layers of one array differ in shape or dtype.
    """
    stacking = stacking_of(model, spelling)
    if stacking is None:
        return checkpoint
    found = dict(slots(model, spelling, stacking))
    grids: dict[str, dict[Index, tuple[str, Tensor | None]]] = {}
    for name, slot in found.items():
        grids.setdefault(slot.name, {})[slot.index] = (name, checkpoint.get(name))
    tensors = {name: t for name, t in checkpoint.items() if name not in found}
    for name, grid in grids.items():
        if any(tensor is not None for _, tensor in grid.values()):
            layers = _alike(name, grid, partial=partial)
            one = next(iter(layers.values()))
            plain = () in layers
            tensors[name] = one if plain else Stacked(layers, _axis(stacking, len(one.shape)))
    return checkpoint.replace(tensors=tensors)


def slots(model: Network, spelling: Spelling, stacking: Stacking) -> Iterator[tuple[str, Slot]]:
    """Every name of a layer's tensor, with where it lies."""
    count, block = len(model.layers), period(model, stacking)
    for parameter in model.parameters():
        for short, _ in parameter.parts(spelling.layout) if parameter.index is not None else ():
            slot = stacking.slot(short, parameter.index or 0, count, block)
            if slot is not None:
                yield spelling.prefix + short, Slot(spelling.prefix + slot.name, slot.index)


def _axis(stacking: Stacking, rank: int) -> int:
    return min(stacking.axis, rank)


def _require_layers(
    checkpoint: Checkpoint, name: str, axis: int, counts: Index, origin: str
) -> None:
    shape = checkpoint[name].shape
    found = shape[axis : axis + len(counts)]
    if found != counts:
        raise LayoutError(
            f"{checkpoint.source}: {name}: expected {list(counts)} layers on axis {axis} by "
            f"{origin}, found shape {list(shape)}",
            f"{origin} and tensors belong to different models",
        )


def _alike(
    name: str, grid: Mapping[Index, tuple[str, Tensor | None]], *, partial: bool
) -> dict[Index, Tensor]:
    """The layers of one array, all of one shape and dtype."""
    first = next(tensor for _, tensor in grid.values() if tensor is not None)
    layers: dict[Index, Tensor] = {}
    for index, (layer, tensor) in grid.items():
        if tensor is None and partial:
            tensor = Zeros(first.shape, first.dtype)
        if tensor is None:
            raise LayoutError(
                f"{layer} is not there, so {name} cannot be stacked",
                "choose a layout that keeps each layer by itself",
            )
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise LayoutError(
                f"{layer}: {tensor.dtype} {list(tensor.shape)} cannot be stacked with "
                f"{first.dtype} {list(first.shape)} in {name}",
                "choose a layout that keeps each layer by itself",
            )
        layers[index] = tensor
    return layers
