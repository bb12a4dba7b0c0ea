"""The base that a run with quantised weights (QLoRA) was trained on, made from the full one.

Training saw ``dequant(W) + delta``; a checkpoint of the factors alone holds no W. So the base is
quantised as Qwix did at the start of the run, in Tunix's axis order, which tells Qwix's tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import TUNIX, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, cast
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.forms import QWIX
from gemma_convert.surgery.adapters.place import Placed, place
from gemma_convert.surgery.quantise import QTYPES, Scheme, quantised

Choice = Scheme | Literal["none"] | None
"""Onto what is merged: the base quantised by a scheme, the full one, or what follows from the
inputs."""

NATIVE = Spelling(TUNIX, "")
"""The spelling in which Qwix quantises."""


_LARGEST_TILE = 2**31


def as_trained(
    weights: Checkpoint,
    model: Model,
    spelling: Spelling,
    adapters: Sequence[Adapter],
    scheme: Scheme,
) -> Checkpoint:
    """``weights`` in Tunix's spelling, those with Qwix factors quantised and dequantised.

    That happens in the dtype of the factors, which Qwix gives the dtype that the weight had. All
    tensors come in one dtype that holds each exactly.

    Args:
        weights: The full base, spelled in ``spelling``.
        model: Its dimensions.
        spelling: How it is spelled.
        adapters: Those of Qwix tell which modules its rule covered.
        scheme: How the run quantised them.

    Raises:
        AdapterError: If no adapter is one of Qwix, or a tile does not divide its axis.
    """
    covered = {
        name: placed
        for adapter in adapters
        for name, placed in place(adapter, model).items()
        if placed.pair.form is QWIX and adapter.spelling.layout is TUNIX
    }
    if not covered:
        raise AdapterError(
            f"--base-quantization {scheme.qtype}: none of the adapters is one of Qwix in "
            "Tunix, whose codes these are; MaxText's are of other axis orders, and PEFT's base was "
            "quantised by other rules (bitsandbytes)",
            "leave it out, or give the adapter as the Tunix checkpoint that training wrote",
        )
    plain = relayout(weights, model, spelling, NATIVE, partial=True)
    trained = {
        name: _trained(name, plain[name], placed, scheme)
        for name, placed in covered.items()
        if name in plain
    }
    found = {**plain, **trained}
    kinds = {tensor.dtype for tensor in found.values()}
    if len(kinds) > 1:
        wide = np.dtype(np.float64 if np.dtype(np.float64) in kinds else np.float32)
        found = {name: cast(tensor, wide) for name, tensor in found.items()}
    return plain.replace(tensors=found)


def _trained(name: str, weight: Tensor, placed: Placed, scheme: Scheme) -> Tensor:
    row = placed.parameter.row
    dimensions = enumerate(row.cell(TUNIX).pattern.groups)
    contracted = [axis for axis, group in dimensions if set(group) <= set(row.inputs)]
    sizes = scheme.groups(name, weight.shape, contracted)
    return quantised(cast(weight, placed.pair.a.dtype), scheme, sizes)


def resolve(choice: Choice, stored: Sequence[Scheme]) -> Scheme | None:
    """The scheme by which the base was quantised: as given, else as checkpoints say.

    Args:
        choice: As given; a scheme without tiles takes those that a checkpoint says.
        stored: What the checkpoints of the adapters say, each scheme once.

    Raises:
        AdapterError: If what is given and what is stored disagree.
    """
    if not isinstance(choice, Scheme):
        return stored[0] if len(stored) == 1 else None
    for scheme in stored:
        if scheme.qtype != choice.qtype or choice.tile not in (None, scheme.tile):
            raise AdapterError(
                f"the checkpoint's metadata says that training quantised to {scheme}, "
                f"the options say {choice}",
                "pass what the run used; --tile left out takes the stored one",
            )
    return stored[0] if stored else choice


def stored_scheme(metadata: Mapping[str, Any]) -> Scheme | None:
    """The scheme in a checkpoint's custom metadata, if it is there.

    The arguments of ``qwix.LoraRule``: ``{"lora": {"weight_qtype": "nf4", "tile_size": 32}}``, or
    in each of ``{"lora": {"rules": [...]}}``.

    Raises:
        AdapterError: If rules differ in it, or they are not understood.
    """
    lora = (metadata.get("custom_metadata") or {}).get("lora")
    if not isinstance(lora, Mapping):
        return None
    rules = lora.get("rules")
    places = [lora, *(rules if isinstance(rules, list) else [rules])]
    own = [rule for rule in places if isinstance(rule, Mapping) and "weight_qtype" in rule]
    schemes = {_scheme(rule) for rule in own}
    if len(schemes) > 1:
        listed = " and ".join(sorted(str(scheme) for scheme in schemes))
        raise AdapterError(
            f"the checkpoint's metadata says that training quantised to {listed}",
            "merge onto the full-precision base with --base-quantization none",
        )
    return schemes.pop() if schemes else None


def _scheme(rule: Mapping[str, Any]) -> Scheme | None:
    qtype, tile = rule.get("weight_qtype"), rule.get("tile_size")
    if qtype is None:
        return None
    method = rule.get("weight_calibration_method") or "absmax"
    plain = isinstance(tile, int | float) and not isinstance(tile, bool)
    number = tile is None or (plain and 0 <= tile <= _LARGEST_TILE)  # nan is not
    if qtype not in QTYPES or method != "absmax" or not number:
        raise AdapterError(
            f"the checkpoint's metadata says weight_qtype {qtype!r}, tile_size {tile!r}, "
            f"calibration {method!r}, which are not understood together",
            f"known are {', '.join(QTYPES)} with a number and absmax; merge onto the "
            "full-precision base with --base-quantization none",
        )
    return Scheme(qtype, None if isinstance(tile, float) and tile == 1 else tile)
