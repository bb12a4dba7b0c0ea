"""Towers on their way: which are carried into an output and how they are named there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.parts import Parts
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor
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
