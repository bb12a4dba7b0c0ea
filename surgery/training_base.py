"""The base that a run with quantised weights (QLoRA) was trained on, made from the full one.

Training saw ``dequant(W) + delta``; a checkpoint of the factors alone holds no W. So the base is
quantised as Qwix did at the start of the run, in Tunix's axis order, which tells Qwix's tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import TUNIX, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, cast
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.known_base import base_dtypes
from gemma_convert.surgery.adapters.place import Placed, place
from gemma_convert.surgery.quantise import Scheme, quantised

Choice = Scheme | Literal["none"] | None
"""Onto what is merged: the base quantised by a scheme, the full one, or what follows from the
inputs."""

NATIVE = Spelling(TUNIX, "")
"""The spelling in which Qwix quantises."""


def as_trained(
    weights: Checkpoint,
    model: Model,
    spelling: Spelling,
    adapters: Sequence[Adapter],
    scheme: Scheme,
) -> Checkpoint:
    """``weights`` in Tunix's spelling, those with Qwix factors quantised and dequantised.

    That happens in the dtype that the weights had in training, see `completed`. All tensors come
    in one dtype that holds each exactly.

    Args:
        weights: The full base, spelled in ``spelling``.
        model: Its dimensions.
        spelling: How it is spelled.
        adapters: Those of Qwix tell which modules its rule covered.
        scheme: How the run quantised them.

    Raises:
        AdapterError: If no adapter is one of Qwix, the dtype is not known, or a tile does not
            divide its axis.
    """
    scheme = completed(scheme, adapters)
    covered = {
        name: placed
        for adapter in of_qwix(adapters)
        for name, placed in place(adapter, model).items()
    }
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
    assert scheme.dtype is not None
    return quantised(cast(weight, scheme.dtype), scheme, sizes)


def of_qwix(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Those of Qwix in Tunix: its codes and axes are known here."""
    return [adapter for adapter in adapters if adapter.spelling.layout is TUNIX]


def resolve(choice: Scheme, stored: Sequence[Scheme]) -> Scheme:
    """The scheme by which the base was quantised: as given, else as checkpoints say.

    Args:
        choice: As given; without tiles or dtype it takes those that a checkpoint says.
        stored: What the checkpoints of the adapters say, each scheme once.

    Raises:
        AdapterError: If what is given and what is stored disagree.
    """
    for scheme in stored:
        if scheme.qtype != choice.qtype or choice.tile not in (None, scheme.tile):
            raise AdapterError(
                f"the checkpoint's metadata says that training quantised to {scheme}, "
                f"the options say {choice}",
                "pass what the run used; --tile left out takes the stored one",
            )
    tiles = {scheme.tile for scheme in stored} or {choice.tile}
    if len(tiles) > 1:
        listed = " and ".join(map(str, stored))
        raise AdapterError(
            f"the adapters were trained on different bases: quantised to {listed}",
            "merge each onto its own, or all onto full precision with --base-quantization none",
        )
    return replace(choice, tile=tiles.pop())


def completed(scheme: Scheme, adapters: Sequence[Adapter]) -> Scheme:
    """``scheme`` with the dtype that the base had in training.

    As given; else as the checkpoints say; else that of the factors, to which Qwix gives the dtype
    of their weights.

    Raises:
        AdapterError: If no adapter is one of Qwix, or the dtype given is not the one stored, or
            several come into question.
    """
    known = [(adapter.source, adapter, base_dtypes(adapter)) for adapter in of_qwix(adapters)]
    if not known:
        raise AdapterError(
            f"--base-quantization {scheme.qtype}: none of the adapters is one of Qwix in "
            "Tunix, whose codes these are; MaxText's are of other axis orders, and PEFT's base was "
            "quantised by other rules (bitsandbytes)",
            "leave it out, or give the adapter as the Tunix checkpoint that training wrote",
        )
    if scheme.dtype is not None:
        for source, adapter, dtypes in known:
            if adapter.trained_on.dtypes and scheme.dtype not in dtypes:
                raise AdapterError(
                    f"{source}: the checkpoint's metadata says that the base was "
                    f"{' or '.join(map(str, dtypes))} in training, --base-dtype says "
                    f"{scheme.dtype}",
                    "leave --base-dtype out to use what is stored",
                )
        return scheme
    found = {dtype for _, _, dtypes in known for dtype in dtypes}
    if len(found) > 1:
        told = "; ".join(f"{s}: {' or '.join(map(str, dtypes))}" for s, _, dtypes in known)
        raise AdapterError(
            f"the dtype of the base in training is not known, in which it was quantised: {told}",
            "pass it with --base-dtype",
        )
    return replace(scheme, dtype=found.pop())


def assumed(adapters: Sequence[Adapter]) -> list[str]:
    """Sources of the adapters of Qwix whose factors alone tell the dtype of the base."""
    return [a.source for a in of_qwix(adapters) if not a.trained_on.dtypes]
