"""Adapters from Tunix to PEFT and back, as jobs: a plan, and what is written beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.dtypes import DType
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.job import Job
from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.model import Model, text_config
from gemma_convert.convert.plan import make_plan, unread
from gemma_convert.convert.tensor import Tensor, cast_floats
from gemma_convert.surgery.adapters.adapter import Adapter, identities
from gemma_convert.surgery.adapters.forms import PEFT, QWIX
from gemma_convert.surgery.adapters.known_base import base_notes, carried
from gemma_convert.surgery.adapters.maxtext import unrolled
from gemma_convert.surgery.adapters.open import Source, opened
from gemma_convert.surgery.adapters.peft_write import one_scale, peft_config, peft_tensors
from gemma_convert.surgery.adapters.qwix_write import qwix_metadata, qwix_tensors
from gemma_convert.surgery.adapters.respell import bake, respell
from gemma_convert.surgery.adapters.values import check_values


@dataclass(frozen=True)
class Exchange:
    """An adapter to be written.

    Attributes:
        job: The plan.
        adapter: As it will be read again.
        beside: adapter_config.json, or the custom metadata of the checkpoint.
    """

    job: Job
    adapter: Adapter
    beside: Mapping[str, Any]


def to_peft(
    source: Source,
    model: Model,
    config: Mapping[str, Any],
    *,
    alpha: float | None = None,
    dtype: DType | None = None,
    base_id: str | None = None,
    revision: str | None = None,
    baked: bool = False,
) -> Exchange:
    """A Tunix or MaxText adapter as PEFT's.

    Args:
        source: The adapter.
        model: The base's dimensions.
        config: The base's config.json: a nested one names its text model as transformers does.
        alpha: LoRA alpha, where the checkpoint's metadata does not say it.
        dtype: Of the factors; as they are if None.
        base_id: Hub id of the base, for adapter_config.json.
        revision: Of ``base_id``.
        baked: Multiply B by the scale, so that alpha is the rank everywhere.

    Raises:
        AdapterError: If the adapter does not fit the base, or PEFT cannot hold it.
    """
    if source.is_peft:
        raise AdapterError(f"{source.checkpoint.source}: a PEFT adapter already", "use it as it is")
    nested = text_config(config) is not config
    spelling = Spelling(HF, "model.language_model." if nested else HF.default_prefix)
    own = _checked(source, alpha, model)
    adapter = respell(own, model, spelling, PEFT)
    adapter = bake(adapter) if baked else adapter
    notes = () if one_scale(adapter) else (_SEVERAL_SCALES,)
    job = _job(peft_tensors(adapter), adapter, own, source, model, dtype, notes)
    return Exchange(job, adapter, peft_config(adapter, base_id, revision))


def to_qwix(source: Source, model: Model, *, dtype: DType | None = None) -> Exchange:
    """A PEFT adapter as Tunix's.

    Args:
        source: The adapter.
        model: The base's dimensions.
        dtype: Of the factors; as they are if None.

    Raises:
        AdapterError: If the adapter does not fit the base, or Qwix cannot hold it.
    """
    if not source.is_peft:
        name = source.checkpoint.source
        raise AdapterError(
            f"{name}: not a PEFT adapter", "give a directory with adapter_config.json"
        )
    own = _checked(source, None, model)
    adapter = respell(own, model, Spelling(TUNIX, ""), QWIX)
    job = _job(qwix_tensors(adapter), adapter, own, source, model, dtype, ())
    return Exchange(job, adapter, qwix_metadata(adapter))


_SEVERAL_SCALES = (
    "modules differ in alpha / r: PEFT reads that from alpha_pattern, vLLM applies one scale to "
    "all; for vLLM write it with --bake-scale"
)


def _checked(source: Source, alpha: float | None, model: Model) -> Adapter:
    adapter = unrolled(opened(source, alpha), model)
    check_values(adapter, allow_zero=True)  # nothing is lost by carrying zeros along
    return carried(adapter)


def _job(
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    own: Adapter,
    source: Source,
    model: Model,
    dtype: DType | None,
    notes: tuple[str, ...],
) -> Job:
    target = Checkpoint(
        {name: cast_floats(tensor, dtype) for name, tensor in tensors.items()},
        notes=(*adapter.notes, *base_notes(adapter), *notes),
    )
    reasons = {id(tensor): reason for tensor, reason in adapter.unused}
    plan = make_plan(target, (source.checkpoint,), unread(target, reasons))
    # Two spellings of one adapter must not be merged into the same weights.
    details = {"same_as": sorted(identities(own)), **adapter.trained_on.entry()}
    return Job(plan, adapter.spelling.layout, model, details=details)
