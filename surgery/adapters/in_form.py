"""An adapter as it is written: PEFT's or Tunix's, whatever it was read as."""

from __future__ import annotations

from dataclasses import replace

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.forms import PEFT, QWIX
from gemma_convert.surgery.adapters.respell import respell


def in_form(adapter: Adapter, model: Model | None, *, to_peft: bool) -> Adapter:
    """``adapter`` in PEFT's form or in Tunix's, names without a wrapper's prefix; itself if it is.

    Args:
        adapter: With a pair a layer.
        model: The base's dimensions; needed where the form changes.
        to_peft: Whether PEFT's is wanted.

    Raises:
        AdapterError: If they are needed and not known, or the form cannot hold a part of it.
    """
    layout, form = (HF, PEFT) if to_peft else (TUNIX, QWIX)
    if adapter.spelling.layout is layout:
        return adapter
    if model is None:
        raise AdapterError(
            f"{adapter.source}: a {adapter.kind}, to be written as {form.name}'s",
            "give the base's directory with --base: its config.json tells the sizes",
        )
    respelled = respell(replace(adapter, weight=1.0), model, Spelling(layout, ""), form)
    return replace(respelled, weight=adapter.weight)
