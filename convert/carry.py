"""Towers on their way: which are carried into an output and how they are named there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.hf_form import Form, form_of
from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.parts import Parts
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, cast_floats
from gemma_convert.convert.towers import Found, beside, shortened

_REPLACED = "the checkpoint has its own weights"


@dataclass
class Carried:
    """The towers of an output.

    Attributes:
        tensors: Under the names of the output's layout.
        reasons: Why a source's tensor is left out, by its identity.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


def carry(
    towers: Iterable[Found],
    text: Spelling,
    *,
    like: Iterable[Found] = (),
    dtype: np.dtype[Any] | None = None,
    computed: np.dtype[Any] | None = None,
) -> Carried:
    """Convert towers to the spelling that goes with the text model's.

    Args:
        towers: The towers to convert.
        text: How the text model of the output is spelled.
        like: Towers whose names the output's are to look like, those of a base.
        dtype: Dtype of the tensors; as in the source if None.
        computed: Dtype of those whose values the layouts store differently; ``dtype`` if None.

    Raises:
        LayoutError: If a tower lacks a tensor, or copies of one differ.
    """
    carried = Carried()
    short = {tower.tower.name for tower in like if tower.shortened}
    for tower in towers:
        network = tower.config.network()
        if not network.is_in(text.layout):
            what = f"the {tower.tower.part} tower of this model, {tower.tower.name}"
            reason = f"layout {text.layout.name} has no names for {what}"
            carried.reasons |= {id(tensor): reason for tensor in tower.tensors.values()}
            continue
        target = beside(text)
        made = relayout(
            tower.tensors, network, tower.spelling, target, dtype=dtype, computed=computed
        )
        renamed = tower.tower.name in short
        carried.tensors |= {
            shortened(name, tower.tower, target) if renamed else name: tensor
            for name, tensor in made.items()
        }
        carried.reasons |= {
            id(tower.tensors[name]): reason
            for name, reason in made.dropped.items()
            if name in tower.tensors
        }
    return carried


def chosen(donor: Parts, base: Parts | None) -> tuple[Found, ...]:
    """The towers of whoever gives the text model, and those that only the base has."""
    known = {tower.tower.name for tower in donor.known}
    others = base.known if base is not None and base is not donor else ()
    return (*donor.known, *(t for t in others if t.tower.name not in known))


def replaced(base: Parts, towers: Iterable[Found]) -> Mapping[int, str]:
    """The tensors of ``base`` in whose place ``towers`` stand, with the reason."""
    names = {tower.tower.name for tower in towers}
    return {
        id(tensor): _REPLACED
        for tower in base.known
        if tower.tower.name in names
        for tensor in tower.tensors.values()
    }


def hf_form(
    reference: Checkpoint,
    model: Model,
    donor: Parts,
    parts: Parts,
    dtype: np.dtype[Any] | None,
    computed: np.dtype[Any] | None,
) -> tuple[Form, Carried]:
    """The form of a Hugging Face output, and the towers in it that are converted.

    What ``reference`` has beside its text is copied as it is, but for the towers that the source
    has itself.

    Args:
        reference: Whose config.json it is: the base, or a source that is its own.
        model: The dimensions.
        donor: What gives the text model.
        parts: What ``reference`` holds.
        dtype: Dtype of the tensors; as they are if None.
        computed: Dtype of those whose values are computed; ``dtype`` if None.

    Raises:
        ConfigError: If there are towers beside a text model's config, or no config is known.
        LayoutError: If a tower lacks a tensor.
    """
    is_hf = parts.spelling is not None and parts.spelling.layout is HF
    found = parts.spelling.prefix if parts.spelling is not None and is_hf else None
    towers = () if is_hf and donor is parts else donor.known
    carried = carry(
        towers,
        Spelling(HF, found or model.family.nested_prefix),
        like=parts.known if is_hf else (),
        dtype=dtype,
        computed=computed,
    )
    carried.reasons |= replaced(parts, towers) if is_hf else {}
    copied = {
        name: cast_floats(tensor, dtype)
        for name, tensor in (parts.towers.items() if is_hf else ())
        if id(tensor) not in carried.reasons
    }
    return form_of(reference, model, found, {**copied, **carried.tensors}), carried
