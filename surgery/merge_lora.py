"""Merge LoRA adapters into the weights they were trained on.

A delta is a lazy tensor in the adapter's layout, so it travels to the base's layout by the same
rows as a weight does.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import Layout, Spelling
from gemma_convert.convert.model import Model, Parameter
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, Zeros
from gemma_convert.surgery.adapter import Adapter, Pair
from gemma_convert.surgery.delta import LowRank, Merged


class Delta(Protocol):
    """What makes the delta of one pair, such as `LowRank`."""

    def __call__(self, parameter: Parameter, layout: Layout, pair: Pair, scale: float) -> Tensor:
        """The delta of ``pair`` in the axis order of ``layout``."""


def deltas(
    adapter: Adapter, model: Model, target: Spelling, product: Delta = LowRank
) -> dict[str, Tensor]:
    """What ``adapter`` adds, as lazy float32 tensors by the names of ``target``.

    Args:
        adapter: The pairs.
        model: The dimensions of the base.
        target: How to spell the deltas.
        product: How to multiply the factors; validation does it in float64.

    Raises:
        AdapterError: If a pair fits no parameter of the model, or has another shape.
    """
    layout = adapter.spelling.layout
    found: dict[str, Tensor] = {}
    for parameter in model.parameters():
        if not parameter.row.inputs:
            continue
        for short, _ in parameter.parts(layout):
            name = adapter.spelling.prefix + short
            if name in adapter.pairs:
                _check_shapes(adapter, name, parameter)
                found[name] = product(parameter, layout, adapter.pairs[name], adapter.scale(name))
        found |= _nothing(parameter, found, adapter.spelling, target)
    left = [name for name in adapter.pairs if name not in found]
    if left:
        raise AdapterError(
            f"{adapter.source}: {left[0]}: the base ({model.family.name}, "
            f"{len(model.layers)} layers) has no such module"
            + (f", nor {len(left) - 1} more that the adapter changes" if len(left) > 1 else ""),
            "give the base that the adapter was trained on",
        )
    spelled = Checkpoint(found, source=adapter.source)
    return dict(relayout(spelled, model, adapter.spelling, target, partial=True))


def _nothing(
    parameter: Parameter, found: dict[str, Tensor], source: Spelling, target: Spelling
) -> dict[str, Tensor]:
    """Deltas of zero for parts without a pair that ``target`` joins with parts that have one.

    Such as up, where the adapter changes the gate alone and DeepMind's layout has both in one.
    """
    names = [source.prefix + short for short, _ in parameter.parts(source.layout)]
    if len(names) == len(parameter.parts(target.layout)) or not set(names) & set(found):
        return {}
    shape = parameter.shape(source.layout)
    return {n: Zeros(shape, np.dtype(np.float32)) for n in names if n not in found}


def _check_shapes(adapter: Adapter, name: str, parameter: Parameter) -> None:
    pair, row = adapter.pairs[name], parameter.row
    inputs, outputs = row.factor_axes(adapter.spelling.layout)
    sizes = {**parameter.sizes, "r": pair.rank}
    for side, factor, expected in (("a", pair.a, (*inputs, "r")), ("b", pair.b, ("r", *outputs))):
        shape = tuple(sizes[axis] for axis in expected)
        if factor.shape != shape:
            raise AdapterError(
                f"{adapter.source}: {name}_lora_{side}: expected ({' '.join(expected)}) = "
                f"{list(shape)} for this base, found {list(factor.shape)}",
                "give the base that the adapter was trained on",
            )


def merge(
    weights: Checkpoint,
    adapters: list[Adapter],
    model: Model,
    spelling: Spelling,
    dtype: np.dtype[Any] | None = None,
) -> Checkpoint:
    """Add ``adapters`` to ``weights``, lazily.

    Args:
        weights: The base, spelled in ``spelling``.
        adapters: What to add; the deltas of one weight are summed before the one rounding.
        model: The base's dimensions.
        spelling: How ``weights`` is spelled.
        dtype: Stored dtype of the merged tensors; the weight's own if None.

    Raises:
        AdapterError: If a pair does not fit the base.
    """
    found: dict[str, list[Tensor]] = {}
    for adapter in adapters:
        for name, delta in deltas(adapter, model, spelling).items():
            found.setdefault(name, []).append(delta)
    absent = [name for name in found if name not in weights]
    if absent:
        raise AdapterError(
            f"{weights.source}: {absent[0]} is not there, but the adapter changes it",
            "give a base that has the keys and values of all layers, as on the Hub",
        )
    merged = {
        name: Merged(tensor.wide, tuple(found[name]), dtype or tensor.dtype)
        for name, tensor in weights.items()
        if name in found
    }
    return weights.replace(tensors={**weights.tensors, **merged})
