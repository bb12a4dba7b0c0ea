"""Where an adapter's pairs belong in a model: by name, then by shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.model import Model
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.pattern import Pattern, Sizes
from gemma_convert.surgery.adapters.adapter import Adapter, Pair
from gemma_convert.surgery.adapters.forms import RANK, Form

_OTHER_BASE = "give the base that the adapter was trained on"


@dataclass(frozen=True)
class Placed:
    """A pair at its parameter.

    Attributes:
        name: The weight's name in the adapter.
        pair: The factors, in the one form that fits.
        parameter: What the weight is, or is a part of.
        at: The part: positions on the axes that the name spells by words.
        scale: What A.B is multiplied by to be added to the weight, without the adapter's weight.
    """

    name: str
    pair: Pair
    parameter: Parameter
    at: Mapping[str, int]
    scale: float

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of all axes, the rank's included."""
        return {**self.parameter.sizes, RANK: self.pair.rank}


def place(adapter: Adapter, model: Model) -> dict[str, Placed]:
    """The pairs of ``adapter`` that belong to the text model, by weight name.

    Raises:
        AdapterError: If factors have another shape than the model asks for.
    """
    placed: dict[str, Placed] = {}
    for parameter in model.parameters():
        for short, at in parameter.parts(adapter.spelling.layout):
            name = adapter.spelling.prefix + short
            pair = adapter.pairs.get(name)
            if pair is not None and _takes(parameter, pair):
                fitted = _fitted(adapter, name, pair, parameter)
                scale = adapter.scale(name) / parameter.gain(adapter.spelling.layout)
                placed[name] = Placed(name, fitted, parameter, at, scale)
    return placed


def no_module(adapter: Adapter, names: list[str], what: str) -> AdapterError:
    """The error for weights ``names`` of an adapter that ``what`` does not have."""
    more = f", nor {len(names) - 1} more that the adapter changes" if len(names) > 1 else ""
    return AdapterError(
        f"{adapter.source}: {names[0]}: {what} has no such module{more}", _OTHER_BASE
    )


def _takes(parameter: Parameter, pair: Pair) -> bool:
    """Whether such a pair can change the parameter: Qwix adapts products alone."""
    row = parameter.row
    return row.is_product if pair.form.is_qwix else bool(row.inputs)


def _fitted(adapter: Adapter, name: str, pair: Pair, parameter: Parameter) -> Pair:
    """``pair`` in the one of its forms whose shapes are right."""
    stacked = [parameter.sizes[axis] for axis in parameter.row.stacked]
    if stacked and stacked != [pair.experts]:
        raise AdapterError(
            f"{adapter.source}: {name}: factors for {pair.experts} experts of rank {pair.rank}, "
            f"this base has {stacked[0]} experts",
            _OTHER_BASE,
        )
    layout = adapter.spelling.layout
    wrong = {form: _misfit(form, pair, parameter, layout) for form in pair.forms}
    fits = [form for form, misfit in wrong.items() if not misfit]
    if len({form.patterns(parameter.row, layout) for form in fits}) == 1:
        return replace(pair, forms=(fits[0],))
    if fits:
        raise AdapterError(
            f"{adapter.source}: {name}: the factors fit both as PEFT writes them since 0.19 and as "
            "it did before, since inputs and outputs have the same size",
            'write the version that trained it into adapter_config.json: "peft_version": "0.18.0"',
        )
    raise AdapterError(f"{adapter.source}: {name}_lora_{wrong[pair.form]}", _OTHER_BASE)


def _misfit(form: Form, pair: Pair, parameter: Parameter, layout: Layout) -> str:
    """What is wrong with the shapes of ``pair`` in ``form``; empty if they fit."""
    sizes = {**parameter.sizes, RANK: pair.rank}
    patterns = form.patterns(parameter.row, layout)
    for side, factor, pattern in zip("ab", (pair.a, pair.b), patterns, strict=True):
        shape = pattern.shape(sizes)
        if factor.shape != shape:
            return (
                f"{side}: expected {_axes(pattern, sizes)} for this base, "
                f"found {list(factor.shape)}"
            )
    if pair.magnitude is not None:
        outputs = parameter.row.factor_axes(layout)[1]
        count = 1
        for axis in outputs:
            count *= sizes[axis]
        if pair.magnitude.shape != (count,):
            return f"magnitude: expected [{count}] for this base, found {pair.magnitude.shape}"
    return ""


def _axes(pattern: Pattern, sizes: Sizes) -> str:
    return f"({pattern.text}) = {list(pattern.shape(sizes))}"
