"""LoRA adapters as MaxText stores them: names, forms, and layers taken out of stacked factors.

Two kinds, both from MaxText git e591f30:

    its own       ``.../query/lora_a.kernel``: each axis a dimension, A (d, r), B (r, n, h); of out
                  A (n, h, r), B (r, d); attention alone (``utils/lora_utils.py``). Scanned layers
                  lie on axis 1 of both. ``adapter_config.json`` beside the steps has r and
                  lora_alpha; the server adds ``alpha / r * A.B`` whatever else that file says.
    Qwix's        ``.../query/kernel_lora_a``: matrices, since Qwix joins the contracted axes of
                  a dot_general and those that remain: A (d, r), B (r, n * h). Scanned layers lie
                  on axis 1, or on axis 0 (``checkpoint_conversion/to_huggingface.py``).

The factors change the kernels that MaxText holds, so the scale it folds into the queries of
Gemma 1 and 2 is in their product too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import MAXTEXT, MAXTEXT_UNSCANNED, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.registry import explain, normal
from gemma_convert.convert.stack import Index, Slice, slots, stacking_of
from gemma_convert.surgery.adapters.adapter import Adapter, Pair
from gemma_convert.surgery.adapters.forms import QWIX, QWIX_MATRICES, RANK, Form

LAYOUTS = (MAXTEXT, MAXTEXT_UNSCANNED)

_NATIVE = re.compile(r"(.+)[./]lora_([ab])\.kernel")
_NATIVE_MODULE = re.compile(r".*/self_attention(_local|_global)?/(query|key|value|out)/kernel")
_DECODER = re.compile(r"(?:.+[./])?decoder[./].+")


def native_factor(name: str) -> tuple[str, str] | None:
    """The weight and the side, a or b, of a factor named in MaxText's own way."""
    found = _NATIVE.fullmatch(name)
    return (f"{found[1]}.kernel", found[2]) if found else None


def is_maxtexts(weight: str) -> bool:
    """Whether a weight with factors is one of MaxText's decoder, by its name."""
    return _DECODER.fullmatch(weight) is not None


def forms(weight: str, *, native: bool) -> tuple[Form, ...]:
    """How factors of ``weight`` may lie; ``native``: named in MaxText's own way."""
    return (QWIX, QWIX_MATRICES) if is_maxtexts(weight) and not native else (QWIX,)


def beside(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The adapter_config.json that lies beside the steps of a MaxText adapter; empty if none.

    Raises:
        AdapterError: If it says that the scale is another than alpha / r, which MaxText applies.
    """
    config: Mapping[str, Any] = metadata.get("beside") or {}
    for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise AdapterError(
                f"the adapter_config.json beside the checkpoint has {key} set, which MaxText "
                "ignores: it applies lora_alpha / r to all modules",
                f"remove {key} from it to get what MaxText serves, or give the PEFT adapter",
            )
    return config


def spelled(adapter: Adapter) -> Adapter:
    """An adapter whose names are MaxText's, spelled in the layout that they are of.

    Raises:
        AdapterError: If a pair named in MaxText's own way is of a module that MaxText refuses.
    """
    names = {name: normal(name, MAXTEXT) for name in adapter.pairs}
    for name, pair in adapter.pairs.items():
        if pair.forms == (QWIX,) and not _NATIVE_MODULE.fullmatch(names[name]):
            raise AdapterError(
                f"{adapter.source}: {name}: MaxText's own LoRA has query, key, value and out of "
                "self_attention alone",
                "save other modules by Qwix, as MaxText's post-training does",
            )
    found = explain({name: pair.b for name, pair in adapter.pairs.items()}, LAYOUTS)
    return replace(
        adapter,
        pairs={names[name]: pair for name, pair in adapter.pairs.items()},
        scales={names[name]: scale for name, scale in adapter.scales.items()},
        spelling=found[0].spelling if found else Spelling(MAXTEXT, ""),
        kind="MaxText LoRA",
    )


def unrolled(adapter: Adapter, model: Model) -> Adapter:
    """``adapter`` with a pair a layer; as it is where its layout does not stack layers.

    Raises:
        AdapterError: If a factor does not hold as many layers of such sizes as ``model`` has.
        LayoutError: If the layout cannot hold the model.
    """
    if adapter.spelling.layout not in LAYOUTS:
        return adapter
    stacking = stacking_of(model, adapter.spelling)
    if stacking is None:
        return adapter
    parameters = _parameters(model, adapter.spelling)
    members: dict[str, dict[str, Index]] = {}
    for name, slot in slots(model, adapter.spelling, stacking):
        if slot.name in adapter.pairs and parameters[name].row.is_product:
            members.setdefault(slot.name, {})[name] = slot.index
    pairs = {name: pair for name, pair in adapter.pairs.items() if name not in members}
    scales = {name: adapter.scales[name] for name in pairs}
    for stacked, layers in members.items():
        one = parameters[next(iter(layers))]
        pairs |= _layers(adapter, stacked, layers, one)
        scales |= dict.fromkeys(layers, adapter.scales[stacked])
    return replace(adapter, pairs=pairs, scales=scales)


def _parameters(model: Model, spelling: Spelling) -> dict[str, Parameter]:
    return {
        spelling.prefix + short: parameter
        for parameter in model.parameters()
        for short, _ in parameter.parts(spelling.layout)
    }


def _layers(
    adapter: Adapter, stacked: str, layers: Mapping[str, Index], parameter: Parameter
) -> dict[str, Pair]:
    """The pairs that the factors of ``stacked`` hold, by the names of the layers' weights."""
    pair = adapter.pairs[stacked]
    counts = tuple(max(places) + 1 for places in zip(*layers.values(), strict=True))
    if not counts:
        return dict.fromkeys(layers, pair)
    fits = _fits(adapter, pair, parameter, counts)
    if len({axis for axis, _ in fits}) != 1:
        found = f"A {list(pair.a.shape)}, B {list(pair.b.shape)}"
        what = "fits with the layers on axis 0 and on axis 1 alike" if fits else "fits neither way"
        raise AdapterError(
            f"{adapter.source}: {stacked}: {found} of {list(counts)} layers of "
            f"{_expected(adapter, pair, parameter)} {what}",
            "give an unscanned checkpoint" if fits else "give the base that it was trained on",
        )
    axis, form = fits[0]
    return {
        name: replace(
            pair, a=Slice(pair.a, axis, index), b=Slice(pair.b, axis, index), forms=(form,)
        )
        for name, index in layers.items()
    }


def _fits(
    adapter: Adapter, pair: Pair, parameter: Parameter, counts: Index
) -> list[tuple[int, Form]]:
    """On which axis the layers lie, by the shapes, and in which form a layer's factors then are."""
    return [
        (axis, form)
        for axis in (1, 0)
        for form in pair.forms
        if all(
            factor.shape == (*shape[:axis], *counts, *shape[axis:])
            for factor, shape in zip(
                (pair.a, pair.b), _shapes(adapter, form, pair, parameter), strict=True
            )
        )
    ]


def _shapes(
    adapter: Adapter, form: Form, pair: Pair, parameter: Parameter
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = {**parameter.sizes, RANK: pair.rank}
    a, b = form.patterns(parameter.row, adapter.spelling.layout)
    return a.shape(sizes), b.shape(sizes)


def _expected(adapter: Adapter, pair: Pair, parameter: Parameter) -> str:
    shapes = [_shapes(adapter, form, pair, parameter) for form in pair.forms]
    return " or ".join(dict.fromkeys(f"A {list(a)}, B {list(b)}" for a, b in shapes))
