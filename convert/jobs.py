"""The conversion jobs as compositions of lazy steps: take apart, relayout, merge, cast.

Nothing is read here but headers, LoRA factors and, where a tied model has a head on disk, that
head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.carry import carry, chosen, hf_form
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError, ConfigError, InputError, LayoutError
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
from gemma_convert.surgery.adapter import Adapter, Pair, check_rank, check_values, resolve_alpha
from gemma_convert.surgery.merge_lora import merge

DType = np.dtype[Any]

_UNKNOWN = "not part of the text model, nor of a tower known here that config.json describes"


@dataclass(frozen=True)
class Job:
    """A plan, and what it was made for.

    Attributes:
        plan: What will be written.
        layout: In which layout.
        model: The dimensions.
        adapter: The LoRA adapter that is merged, if there is one.
    """

    plan: Plan
    layout: Layout
    model: Model
    adapter: Adapter | None = None


def convert(
    source: Checkpoint,
    to: Layout,
    *,
    base: Checkpoint | None = None,
    model: str | None = None,
    alpha: float | None = None,
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
        alpha: LoRA alpha, where the source's metadata does not say it.
        dtype: Stored dtype; as in the source if None.
        computed_dtype: Stored dtype of tensors whose values the two layouts store differently;
            ``dtype`` if None.
        layout: The layout of ``source``; told from its names if None.

    Raises:
        GemmaConvertError: If the inputs do not fit together; see the steps.
    """
    reference = base if base is not None else source
    dims = _model(reference, model)
    own = take_apart(source, dims, layout)
    other = _base_parts(base, dims) if base is not None else None
    donor = own if own.text else other
    if donor is None or not donor.text or donor.spelling is None:
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
    stored = as_stored(dims, donor.text, donor.spelling)
    target = relayout(
        donor.text,
        stored,
        donor.spelling,
        spelling,
        dtype=dtype,
        computed=computed_dtype,
        spare=_spare(other, dims, spelling, dtype) if donor is own else None,
    )
    target = fit_vocabulary(target, dims, spelling, _base_embedding(other, dims))
    adapter = _adapter(source, own.pairs, alpha)
    if adapter is not None:
        target = merge(target, [adapter], dims, spelling)
    tensors = {**target.tensors, **(carried.tensors if form is None else form.others)}
    if form is not None:
        require_whole(reference.source, form, dims, donor is own)
        target = target.replace(notes=target.notes + form.notes)
    target = target.replace(
        config=form.config if form is not None else reference.config,
        tensors=_in_order(tensors, reference),
        notes=(*target.notes, *_computed_note(target)),
        files=reference.files,
    )
    return Job(_plan(target, source, own, base, other, carried.reasons), to, dims, adapter)


def orbax_to_hf(
    checkpoint: Checkpoint,
    base: Checkpoint,
    *,
    alpha: float | None = None,
    dtype: DType | None = None,
) -> Job:
    """A JAX checkpoint (weights, LoRA factors, or both) as a Hugging Face checkpoint.

    Args:
        checkpoint: Orbax tree.
        base: HF directory; see `convert`.
        alpha: LoRA alpha, where the checkpoint's metadata does not say it.
        dtype: Stored dtype; as in the source if None.

    Raises:
        GemmaConvertError: If the two do not fit together; see the steps.
    """
    if checkpoint.format == "safetensors":
        raise InputError(f"{checkpoint.source}: safetensors already", "give an Orbax checkpoint")
    return convert(checkpoint, HF, base=base, alpha=alpha, dtype=dtype)


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


def _model(reference: Checkpoint, name: str | None) -> Model:
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


def _adapter(source: Checkpoint, pairs: Mapping[str, Pair], alpha: float | None) -> Adapter | None:
    """The adapter that ``source`` holds, its values checked."""
    if not pairs:
        if alpha is None:
            return None
        raise AdapterError(
            f"{source.source}: it holds no LoRA factors that --alpha {alpha:g} could scale",
            "give the checkpoint with the factors, or leave --alpha out",
        )
    value = resolve_alpha(source.metadata, alpha, source.source)
    check_rank(source.metadata, pairs)
    adapter = Adapter(pairs, value, Spelling(TUNIX, ""), source.source)
    check_values(adapter)
    return adapter


def _plan(
    target: Checkpoint,
    source: Checkpoint,
    own: Parts,
    base: Checkpoint | None,
    other: Parts | None,
    reasons: Mapping[int, str],
) -> Plan:
    """Give every tensor that the target does not read its reason, and prove the rest."""
    read = reached(target)
    dropped = {**target.dropped, **source.dropped, **own.dropped}
    for name, tensor in own.towers.items():
        if id(tensor) not in read:
            dropped[name] = reasons.get(id(tensor), _UNKNOWN)
    if base is not None and other is not None:
        dropped |= {**base.dropped, **other.dropped}
        for name, tensor in other.towers.items():
            if id(tensor) not in read:
                dropped[name] = reasons.get(id(tensor), _UNKNOWN)
        for name, tensor in base.items():
            if id(tensor) not in read and name not in dropped:
                dropped[name] = "the checkpoint has its own weights"
    target = target.replace(dropped=dropped)
    return make_plan(target, (source,) if base is None else (source, base))


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
