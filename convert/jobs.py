"""The conversion jobs as compositions of lazy steps: take apart, relayout, merge, cast.

Nothing is read here but headers, LoRA factors and, where a tied model has a head on disk, that
head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.bases import choose
from gemma_convert.convert.carry import carry, chosen, hf_form
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError, InputError, LayoutError
from gemma_convert.convert.hf_form import require_whole
from gemma_convert.convert.layouts import HF, TUNIX, Layout, Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.parts import Parts, take_apart
from gemma_convert.convert.plan import Plan, make_plan, reached
from gemma_convert.convert.registry import families, named_model
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, ancestry
from gemma_convert.convert.values import Revalued
from gemma_convert.convert.vocabulary import as_stored, embedding_name, fit_vocabulary
from gemma_convert.surgery import head
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.gather import gather, refuse_merged
from gemma_convert.surgery.adapters.open import Source
from gemma_convert.surgery.merge_lora import merge
from gemma_convert.surgery.replace import replace_saved
from gemma_convert.surgery.training_base import Choice

DType = np.dtype[Any]

_REPLACED = "an adapter replaces it"
_UNKNOWN = "not part of the text model, nor of a tower known here that config.json describes"


@dataclass(frozen=True)
class Job:
    """A plan, and what it was made for.

    Attributes:
        plan: What will be written.
        layout: In which layout.
        model: The dimensions; None where none are needed.
        adapters: The LoRA adapters that are merged.
        merged_before: What earlier runs merged into the same weights: source, weight, digest.
        bases: Where training had quantised the base: the version that is merged onto, and the one
            that it is compared with, if there is one.
        details: What else the ledger keeps, as JSON values.
        summary: What else people are told: rows of a table, label and text.
    """

    plan: Plan
    layout: Layout
    model: Model | None
    adapters: tuple[Adapter, ...] = ()
    merged_before: tuple[Mapping[str, Any], ...] = ()
    bases: tuple[str, str] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    summary: tuple[tuple[str, str], ...] = ()


def convert(
    source: Checkpoint,
    to: Layout,
    *,
    base: Checkpoint | None = None,
    model: str | None = None,
    alpha: float | None = None,
    adapters: Sequence[Source] = (),
    allow_unchanged: bool = False,
    merge_again: bool = False,
    base_quantization: Choice = None,
    dtype: DType | None = None,
    computed_dtype: DType | None = None,
    layout: Layout | None = None,
) -> Job:
    """A checkpoint in any layout, with or without LoRA factors, in another layout.

    Args:
        source: Weights, LoRA factors, or both.
        to: The layout to write.
        base: HF directory that gives config and side files, the towers and, where ``source`` has
            no weights of its own, the weights. An HF source is its own base.
        model: Name of a public model, where neither base nor source has a config.json. An HF
            output then gets one from what is known of that model, and no tokenizer.
        alpha: LoRA alpha, where the metadata of factors does not say it.
        adapters: More adapters to merge.
        allow_unchanged: Whether a pair may be all zero.
        merge_again: Whether an adapter may be one that was merged into these weights before.
        base_quantization: For adapters of a QLoRA run: merge onto the base quantised by this
            scheme, or with "none" onto the full-precision base although the source has codes.
        dtype: Stored dtype; as in the source if None.
        computed_dtype: Stored dtype of tensors whose values the two layouts store differently;
            ``dtype`` if None.
        layout: The layout of ``source``; told from its names if None.

    Raises:
        GemmaConvertError: If the inputs do not fit together; see the steps.
    """
    reference = base if base is not None else source
    dims = model_of(reference, model)
    own = take_apart(source, dims, layout)
    other = _base_parts(base, dims) if base is not None else None
    lora = [*([source] if own.pairs else []), *(adapter.checkpoint for adapter in adapters)]
    bases = choose(own, other, base_quantization, [one.metadata for one in lora])
    donor = bases.donor if bases is not None else None
    if bases is None or donor is None or donor.spelling is None:
        raise InputError(
            f"{reference.source}: no weights"
            + (f", and {source.source} holds LoRA factors alone" if own.pairs else ""),
            "give the base's safetensors with --base",
        )
    if base is not None and own.text and own.text.keys() & base.keys():
        raise InputError(
            f"{source.source}: {next(iter(own.text))}: {base.source} has a tensor of that name too",
            "leave --base out: a Hugging Face directory is its own base",
        )
    for parts in (own, other):
        if parts is not None:
            _require_plain_weights(parts)
    if to is HF:
        form, carried = hf_form(reference, dims, donor, other or own, dtype, computed_dtype)
        spelling = Spelling(HF, form.prefix)
    else:
        spelling = Spelling(to, to.default_prefix)
        towers = chosen(donor, other)
        form, carried = None, carry(towers, spelling, dtype=dtype, computed=computed_dtype)
    if donor.spelling.layout is not HF or to is not HF:
        _require_tied(dims)
    merged = gather(source, own.pairs, adapters, dims, alpha=alpha, allow_zero=allow_unchanged)
    before = tuple(donor.text.metadata.get("merged", ()))
    if not merge_again:
        refuse_merged(donor.text.source, merged, before)
    known = as_stored(dims, donor.text, donor.spelling)
    target = relayout(
        donor.text,
        known,
        donor.spelling,
        spelling,
        dtype=dtype,
        computed=computed_dtype,
        spare=_spare(other, dims, spelling, dtype) if donor is own else None,
    )
    target = bases.compared(target, dims, spelling, merged)
    untied = head.untie(target, merged, dims, spelling) if dims.tied else {}
    config = reference.config
    if form is not None:
        require_whole(reference.source, form, dims, donor is own)
        target = target.replace(
            tensors={**target.tensors, **form.others, **untied}, notes=target.notes + form.notes
        )
        config = head.untied_config(form.config) if untied else form.config
    target, replaced = replace_saved(target, merged, known, spelling)
    target = fit_vocabulary(target, dims, spelling, _base_embedding(other, dims))
    target = merge(target, merged, dims, spelling)
    tensors = {**target.tensors, **(carried.tensors if form is None else {})}
    target = target.replace(
        config=config,
        tensors=_in_order(tensors, reference),
        notes=(*target.notes, *_computed_note(target), *([bases.note] if bases.note else [])),
        files=reference.files,
    )
    unused = bases.unused()
    unused |= {id(t): reason for adapter in merged for t, reason in adapter.unused}
    unused |= {id(step): _REPLACED for tensor in replaced for step in ancestry(tensor)}
    extra = tuple(adapter.checkpoint for adapter in adapters)
    unused |= carried.reasons
    plan = _plan(target, source, own, base, other, extra, unused)
    return Job(plan, to, dims, merged, before, bases.names)


def orbax_to_hf(
    checkpoint: Checkpoint,
    base: Checkpoint,
    *,
    alpha: float | None = None,
    adapters: Sequence[Source] = (),
    allow_unchanged: bool = False,
    merge_again: bool = False,
    base_quantization: Choice = None,
    dtype: DType | None = None,
) -> Job:
    """A JAX checkpoint (weights, LoRA factors, or both) as a Hugging Face checkpoint.

    Args:
        checkpoint: Orbax tree.
        base: HF directory; see `convert`.
        alpha: LoRA alpha, where the metadata of factors does not say it.
        adapters: More adapters to merge.
        allow_unchanged: Whether a pair may be all zero.
        merge_again: Whether an adapter may be one that was merged into these weights before.
        base_quantization: For adapters of a QLoRA run: merge onto the base quantised by this
            scheme, or with "none" onto the full-precision base although the source has codes.
        dtype: Stored dtype; as in the source if None.

    Raises:
        GemmaConvertError: If the two do not fit together; see the steps.
    """
    if checkpoint.format == "safetensors":
        raise InputError(f"{checkpoint.source}: safetensors already", "give an Orbax checkpoint")
    return convert(
        checkpoint,
        HF,
        base=base,
        alpha=alpha,
        adapters=adapters,
        allow_unchanged=allow_unchanged,
        merge_again=merge_again,
        base_quantization=base_quantization,
        dtype=dtype,
    )


def hf_to_orbax(base: Checkpoint, *, layout: Layout = TUNIX, dtype: DType | None = None) -> Job:
    """A Hugging Face checkpoint in a JAX layout.

    Args:
        base: HF directory.
        layout: The layout to write.
        dtype: Stored dtype; as in the source if None.

    Raises:
        GemmaConvertError: If config and tensors do not fit together.
    """
    return convert(base, layout, dtype=dtype)


def model_of(reference: Checkpoint, name: str | None) -> Model:
    """The dimensions: by config.json, else those of a named public model."""
    if reference.config:
        model = read_model(reference.config, families())
        if name is not None and named_model(name).name != model.name:
            raise ConfigError(
                f"{reference.source}: config.json is not that of {name}",
                "leave --model out to go by config.json",
            )
        return model
    if name is None:
        raise InputError(
            f"{reference.source}: no config.json",
            "give the base model's Hugging Face directory with --base, or name the model with "
            "--model",
        )
    return named_model(name)


def _base_parts(base: Checkpoint, model: Model) -> Parts:
    parts = take_apart(base, model)
    if parts.spelling is not None and parts.spelling.layout is not HF:
        raise LayoutError(
            f"{base.source}: the base is in layout {parts.spelling.layout.name}",
            "give a Hugging Face directory",
        )
    return parts


def _spare(
    base: Parts | None, model: Model, spelling: Spelling, dtype: DType | None
) -> Checkpoint | None:
    """The base's weights in ``spelling``, to take from them what the source lacks."""
    dead = any(parameter.unread for parameter in model.parameters())
    if base is None or base.spelling is None or not base.text or not dead:
        return None
    stored = as_stored(model, base.text, base.spelling)
    return relayout(base.text, stored, base.spelling, spelling, dtype=dtype)


def _base_embedding(parts: Parts | None, model: Model) -> Tensor | None:
    if parts is None or parts.spelling is None:
        return None
    return parts.text.get(embedding_name(model, parts.spelling))


def _plan(
    target: Checkpoint,
    source: Checkpoint,
    own: Parts,
    base: Checkpoint | None,
    other: Parts | None,
    adapters: tuple[Checkpoint, ...],
    unused: Mapping[int, str],
) -> Plan:
    """Give every tensor that the target does not read its reason, and prove the rest."""
    read = reached(target)
    dropped = {**target.dropped, **source.dropped, **own.dropped}
    for name, tensor in own.towers.items():
        if id(tensor) not in read:
            dropped[name] = unused.get(id(tensor), _UNKNOWN)
    if base is not None and other is not None:
        dropped |= {**base.dropped, **other.dropped}
        for name, tensor in other.towers.items():
            if id(tensor) not in read:
                dropped[name] = unused.get(id(tensor), _UNKNOWN)
        for name, tensor in base.items():
            if id(tensor) not in read and name not in dropped:
                dropped[name] = "the checkpoint has its own weights"
    sources = (source, *(() if base is None else (base,)), *adapters)
    for name, tensor in ((n, t) for checkpoint in sources for n, t in checkpoint.items()):
        if id(tensor) not in read and id(tensor) in unused:
            dropped[name] = unused[id(tensor)]
    return make_plan(target.replace(dropped=dropped), sources)


def _require_plain_weights(parts: Parts) -> None:
    """Refuse quantised weights: without their scales the numbers mean nothing."""
    for name, tensor in (*parts.text.items(), *parts.towers.items()):
        # a tower may hold wide integers that are no weights, such as position ids
        counts = name in parts.towers and tensor.dtype.kind in "iub" and tensor.dtype.itemsize > 1
        if not counts and not dtypes.is_weight(tensor.dtype):
            raise LayoutError(
                f"{parts.text.source}: {name} is {tensor.dtype}: a quantised weight",
                "give the checkpoint before its quantisation",
            )


def _require_tied(model: Model) -> None:
    """Refuse models with a head of their own where the weights are or become Tunix's."""
    if not model.tied:
        raise ConfigError(
            "config.json: tie_word_embeddings is false, but Tunix's models have no head beside "
            "the embedding: it would be lost",
            "set it to true if the model's head is its embedding",
        )


def _computed_note(target: Checkpoint) -> tuple[str, ...]:
    """What to say of tensors whose values are computed and may not come back."""
    lossy = [
        name
        for name, tensor in target.items()
        for step in ancestry(tensor)
        if isinstance(step, Revalued) and step.may_lose and step.dtype.itemsize < _EXACT_BYTES
    ]
    if not lossy:
        return ()
    return (
        f"{len(set(lossy))} tensors hold other values in this layout, such as {lossy[0]}; they are "
        f"computed in float32, but in {target[lossy[0]].dtype} not all of them can come back: "
        "--computed-dtype float32 stores them so that they can",
    )


_EXACT_BYTES = 4


def _in_order(tensors: dict[str, Tensor], base: Checkpoint) -> dict[str, Tensor]:
    """The tensors in the base's order, those that it does not have last."""
    order = {name: position for position, name in enumerate(base)}
    return dict(sorted(tensors.items(), key=lambda item: order.get(item[0], len(order))))
