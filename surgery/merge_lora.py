"""Merge LoRA adapters into the weights they were trained on.

A delta is a lazy tensor in the adapter's layout, so it travels to the base's layout by the same
rows as a weight does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import HF, Layout, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.rows import row
from gemma_convert.convert.stack import unstacked
from gemma_convert.convert.tensor import Tensor, Zeros
from gemma_convert.convert.vocabulary import embedding_name, with_rows
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.peft_keys import weight_name
from gemma_convert.surgery.adapters.place import Placed, no_module, place
from gemma_convert.surgery.delta import FLOAT32, Arithmetic, Merged

_MATRIX = row("matrix", inputs="i", hf=("matrix", "o i"))
"""A weight outside the text model: a head or a tower's projection, (out, in)."""


def deltas(
    adapter: Adapter,
    model: Model,
    target: Spelling,
    weights: Checkpoint | None = None,
    arithmetic: Arithmetic = FLOAT32,
) -> dict[str, Tensor]:
    """What ``adapter`` adds to the text model, as lazy tensors by the names of ``target``.

    Args:
        adapter: The adapter; pairs of weights outside the text model are left aside.
        model: The base's dimensions.
        target: How to spell and lay out the deltas.
        weights: The base in ``target``'s spelling, for DoRA.
        arithmetic: How to compute them.

    Raises:
        AdapterError: If a pair has another shape than its parameter, or there is no such layer.
    """
    placed = place(adapter, model)
    originals = _originals(placed, model, weights, target, adapter.spelling)
    found = {
        name: _delta(adapter, pair, adapter.spelling.layout, originals.get(name), arithmetic)
        for name, pair in placed.items()
    }
    if not found:
        return {}
    for parameter in {id(p.parameter): p.parameter for p in placed.values()}.values():
        found |= _nothing(parameter, found, adapter.spelling, target)
    spelled = Checkpoint(found, source=adapter.source)
    return dict(relayout(spelled, model, adapter.spelling, target, partial=True, deltas=True))


def all_deltas(
    adapter: Adapter,
    model: Model,
    weights: Checkpoint,
    spelling: Spelling,
    arithmetic: Arithmetic = FLOAT32,
) -> dict[str, Tensor]:
    """What ``adapter`` adds to ``weights``, to its text model and to others, by their names there.

    Args:
        adapter: The adapter.
        model: The base's dimensions.
        weights: The base; see `merge`.
        spelling: How its text model is spelled.
        arithmetic: How to compute the deltas.

    Raises:
        AdapterError: If a pair does not fit the base.
    """
    text = deltas(adapter, model, spelling, weights, arithmetic)
    embedding = embedding_name(model, spelling)
    if embedding in text and embedding in weights:
        text[embedding] = with_rows(text[embedding], weights[embedding].shape[0])
    return text | _outside(adapter, model, weights, spelling, arithmetic)


def merge(
    weights: Checkpoint,
    adapters: Sequence[Adapter],
    model: Model,
    spelling: Spelling,
    dtype: np.dtype[Any] | None = None,
) -> Checkpoint:
    """Add ``adapters`` to ``weights``, lazily.

    Args:
        weights: The base, its text model spelled in ``spelling``; a head and towers under their
            Hugging Face names, if there are any.
        adapters: What to add; the deltas of one weight are summed before the one rounding.
        model: The base's dimensions.
        spelling: How ``weights`` is spelled.
        dtype: Stored dtype of the merged tensors; the weight's own if None.

    Raises:
        AdapterError: If a pair does not fit the base.
    """
    found: dict[str, list[Tensor]] = {}
    for adapter in adapters:
        for name, delta in all_deltas(adapter, model, weights, spelling).items():
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


def _delta(
    adapter: Adapter,
    placed: Placed,
    layout: Layout,
    weight: Tensor | None,
    arithmetic: Arithmetic,
) -> Tensor:
    """What one pair adds, in the adapter's own layout."""
    magnitude = placed.pair.magnitude
    if magnitude is None or weight is None:
        scale = placed.scale * adapter.weight
        return arithmetic.product(placed.parameter, layout, placed.pair, scale)
    product = arithmetic.product(placed.parameter, layout, placed.pair, placed.scale)
    groups = placed.parameter.row.cell(layout).pattern.groups
    inputs = 0 if set(groups[0]) <= set(placed.parameter.row.inputs) else 1
    delta = arithmetic.dora(weight, product, magnitude, inputs)
    return delta if adapter.weight == 1 else arithmetic.weighted(delta, adapter.weight)


def _originals(
    placed: Mapping[str, Placed],
    model: Model,
    weights: Checkpoint | None,
    spelling: Spelling,
    target: Spelling,
) -> Mapping[str, Tensor]:
    """The weights that DoRA normalises, in the adapter's spelling ``target``."""
    needed = [p.parameter for p in placed.values() if p.pair.magnitude is not None]
    if not needed:
        return {}
    if weights is None:
        raise AdapterError("DoRA changes a weight by its norm", "give the base's weights")
    names = {
        spelling.prefix + short
        for parameter in needed
        for short, _ in parameter.parts(spelling.layout)
    }
    apart = unstacked(weights, model, spelling)
    some = {name: tensor.wide for name, tensor in apart.items() if name in names}
    return relayout(weights.replace(tensors=some), model, spelling, target, partial=True)


def _outside(
    adapter: Adapter,
    model: Model,
    weights: Checkpoint,
    spelling: Spelling,
    arithmetic: Arithmetic,
) -> dict[str, Tensor]:
    """What ``adapter`` adds to weights outside the text model, by their names in ``weights``."""
    text = place(adapter, model)
    names = [name for name in adapter.pairs if name not in text]
    if not names:
        return {}
    known = {weight_name(name): name for name in weights} if spelling.layout is HF else {}
    left = [name for name in names if name not in known or len(weights[known[name]].shape) != 2]
    if left:
        what = f"the base ({model.family.name}, {len(model.layers)} layers)"
        raise no_module(adapter, left, what)
    return {
        known[name]: _matrix_delta(adapter, name, weights[known[name]].wide, model, arithmetic)
        for name in names
    }


def _matrix_delta(
    adapter: Adapter, name: str, weight: Tensor, model: Model, arithmetic: Arithmetic
) -> Tensor:
    pair, (outputs, inputs) = adapter.pairs[name], weight.shape
    parameter = Parameter(_MATRIX, None, model.common, {"o": outputs, "i": inputs})
    for side, factor, shape in (
        ("a", pair.a, (pair.rank, inputs)),
        ("b", pair.b, (outputs, pair.rank)),
    ):
        if factor.shape != shape:
            raise AdapterError(
                f"{adapter.source}: {name}_lora_{side}: expected {list(shape)} for this base, "
                f"found {list(factor.shape)}",
                "give the base that the adapter was trained on",
            )
    placed = Placed(name, pair, parameter, {}, adapter.scale(name))
    return _delta(adapter, placed, HF, weight, arithmetic)


def _nothing(
    parameter: Parameter, found: dict[str, Tensor], source: Spelling, target: Spelling
) -> dict[str, Tensor]:
    """Deltas of zero for parts without a pair that ``target`` joins with parts that have one.

    Such as up, where the adapter changes the gate alone and DeepMind's layout has both in one.
    """
    names = [source.prefix + short for short, _ in parameter.parts(source.layout)]
    if len(names) == len(parameter.parts(target.layout)) or not set(names) & set(found):
        return {}
    dtype = next(found[name].dtype for name in names if name in found)
    shape = parameter.shape(source.layout)
    return {n: Zeros(shape, dtype) for n in names if n not in found}
