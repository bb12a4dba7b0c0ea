"""Adapters that were computed, as jobs: the tensors, what stands beside them, the proof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.job import Job
from gemma_convert.convert.layouts import HF
from gemma_convert.convert.model import Model
from gemma_convert.convert.plan import make_plan, unread
from gemma_convert.convert.tensor import Array, Tensor
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.known_base import base_notes
from gemma_convert.surgery.adapters.peft_write import peft_config, peft_tensors
from gemma_convert.surgery.adapters.qwix_write import qwix_metadata, qwix_tensors
from gemma_convert.surgery.exchange import Exchange
from gemma_convert.surgery.low_rank import product_svd


def adapter_job(
    adapter: Adapter,
    sources: Sequence[Checkpoint],
    model: Model | None,
    *,
    reasons: Mapping[int, str] | None = None,
    details: Mapping[str, Any] | None = None,
    summary: Sequence[tuple[str, str]] = (),
    base: tuple[str | None, str | None] = (None, None),
) -> Exchange:
    """``adapter`` as it will be written: PEFT's if its names are Hugging Face's, else Tunix's.

    Args:
        adapter: Spelled and laid out as it is to be written.
        sources: What it was computed from.
        model: Dimensions of its base, if they are known.
        reasons: Identity of a source tensor that is not read, to why not.
        details: For the ledger.
        summary: For people.
        base: Hub id and revision of the base, for adapter_config.json.

    Raises:
        AdapterError: If Qwix has no place for a part of it.
    """
    if adapter.spelling.layout is HF:
        tensors, beside = peft_tensors(adapter), peft_config(adapter, *base)
    else:
        _require_plain(adapter)
        tensors, beside = qwix_tensors(adapter), qwix_metadata(adapter)
    target = Checkpoint(tensors, notes=(*adapter.notes, *base_notes(adapter)))
    known = {id(tensor): reason for tensor, reason in adapter.unused} | dict(reasons or {})
    plan = make_plan(target, sources, unread(target, known))
    told = {**(details or {}), **adapter.trained_on.entry()}
    job = Job(plan, adapter.spelling.layout, model, details=told, summary=tuple(summary))
    return Exchange(job, adapter, beside)


def _require_plain(adapter: Adapter) -> None:
    magnitudes = [name for name, pair in adapter.pairs.items() if pair.magnitude is not None]
    for name in (*adapter.saved, *magnitudes):
        what = "a DoRA magnitude" if name in adapter.pairs else "a module saved whole"
        raise AdapterError(
            f"{adapter.source}: {name}: {what}, for which an adapter of Qwix has no place",
            "write PEFT's format",
        )


def difference(one: tuple[Array, Array], other: tuple[Array, Array]) -> float:
    """||B.A - B'.A'|| / ||B.A|| of two pairs (A, B), from the factors alone."""
    (a, b), (a2, b2) = one, other
    size = product_svd(b, a).energy
    if not size:
        return 0.0
    return sqrt(product_svd(np.hstack([b, -b2]), np.vstack([a, a2])).energy / size)


def span(values: Iterable[float]) -> str:
    """The smallest and the largest of some numbers."""
    low, high = min(found := list(values)), max(found)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def sources_of(tensor: Tensor) -> set[int]:
    """Identities of the tensors on a disk that ``tensor`` is computed from."""
    if not tensor.parents:
        return {id(tensor)}
    return {found for parent in tensor.parents for found in sources_of(parent)}
