"""What is known of the base of an adapter, to go along when its factors become others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import HF, TUNIX
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.trained_on import TrainedOn


def base_dtypes(adapter: Adapter) -> tuple[np.dtype[Any], ...]:
    """The dtypes that the base of a Qwix adapter may have had: as stored, else the factors'.

    Raises:
        AdapterError: If what is stored is not known.
    """
    factors = (factor for pair in adapter.pairs.values() for factor in pair.factors().values())
    return adapter.trained_on.base_dtypes() or tuple(dict.fromkeys(f.dtype for f in factors))


def carried(adapter: Adapter) -> Adapter:
    """``adapter`` with all that is known of its base, before its factors become others.

    Qwix gives factors the dtype of their weights; those of float32 alone tell nothing: they may
    have been widened since, and PEFT widens its own. How a base was quantised in MaxText's axes
    cannot be said in Tunix's: a note tells of it.
    """
    if adapter.spelling.layout is HF:
        return adapter
    said = adapter.trained_on
    names = said.dtypes
    if not names:
        found = base_dtypes(adapter)
        names = tuple(map(str, found)) if any(dtype.itemsize == 2 for dtype in found) else ()
    if adapter.spelling.layout is TUNIX or not said.rules:
        return replace(adapter, trained_on=TrainedOn(said.rules, names))
    note = (
        f"{adapter.source}: training quantised the base to {said.quantised} in MaxText's axes, "
        "which is not carried along: merge the checkpoint that training wrote"
    )
    return replace(adapter, trained_on=TrainedOn((), names), notes=(*adapter.notes, note))


def one_base(adapters: Sequence[Adapter]) -> tuple[TrainedOn, tuple[str, ...]]:
    """What is known of the base of a sum of ``adapters``, and what a user should know of that.

    Raises:
        AdapterError: If they say that it was quantised in different ways.
    """
    said = [adapter for adapter in adapters if adapter.trained_on.rules]
    for other in said[1:]:
        if other.trained_on.quantised != said[0].trained_on.quantised:
            raise AdapterError(
                f"{said[0].source} was trained on a base quantised to "
                f"{said[0].trained_on.quantised}, {other.source} on one quantised to "
                f"{other.trained_on.quantised}: their sum has no one base",
                "merge them onto full precision: gemma-convert surgery merge-lora "
                "--base-quantization none",
            )
    silent = [adapter.source for adapter in adapters if not adapter.trained_on.rules]
    note = (
        f"{', '.join(silent)}: no word of how training quantised the base; taken for the one of "
        f"{said[0].source}, {said[0].trained_on.quantised}"
        if said and silent
        else ""
    )
    rules = said[0].trained_on.rules if said else ()
    dtypes = dict.fromkeys(name for adapter in adapters for name in adapter.trained_on.dtypes)
    return TrainedOn(rules, tuple(dtypes)), (note,) if note else ()


def base_notes(adapter: Adapter) -> tuple[str, ...]:
    """What a user should know of the base of an adapter that is written as PEFT's."""
    if adapter.spelling.layout is not HF or not adapter.trained_on.rules:
        return ()
    return (
        f"training saw the base quantised to {adapter.trained_on}, and PEFT applies the factors to "
        "whatever base it is given; onto what training saw, merge the Tunix adapter with "
        "--base-quantization",
    )
