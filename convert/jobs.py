"""The conversion jobs as compositions of lazy steps: take apart, relayout, merge, cast.

Nothing is read here but headers, LoRA factors and, where a tied model has a head on disk, that
head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemma_convert.convert.carry import surroundings
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.dtypes import DType
from gemma_convert.convert.errors import ConfigError, InputError
from gemma_convert.convert.inputs import read_inputs
from gemma_convert.convert.job import Job
from gemma_convert.convert.job_notes import computed_note, mixed_note
from gemma_convert.convert.layouts import HF, TUNIX, Layout
from gemma_convert.convert.leftovers import plan_of
from gemma_convert.convert.readers.side_files import files_of_both
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.rope import with_rope_type
from gemma_convert.convert.tensor import Tensor, ancestry
from gemma_convert.convert.vocabulary import as_stored, fit_vocabulary
from gemma_convert.surgery import head
from gemma_convert.surgery.adapters.gather import gather, refuse_merged
from gemma_convert.surgery.adapters.open import Source
from gemma_convert.surgery.merge_lora import merge
from gemma_convert.surgery.replace import replace_saved
from gemma_convert.surgery.training_base import Choice

_REPLACED = "an adapter replaces it"


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
    inputs = read_inputs(source, base, adapters, model=model, layout=layout)
    dims, own = inputs.model, inputs.own
    merged = gather(source, own.pairs, adapters, dims, alpha=alpha, allow_zero=allow_unchanged)
    bases, donor, found = inputs.weights(base_quantization, merged)
    if not dims.tied and (found.layout is not HF or to is not HF):
        raise _untied()
    around = surroundings(inputs, donor, to, dtype, computed_dtype)
    spelling = around.spelling
    before = tuple(donor.text.metadata.get("merged", ()))
    if not merge_again:
        refuse_merged(donor.text.source, merged, before)
    known = as_stored(dims, donor.text, found)
    spare = inputs.spare(spelling, dtype) if donor is own else None
    target = relayout(
        donor.text, known, found, spelling, dtype=dtype, computed=computed_dtype, spare=spare
    )
    target = bases.compared(target, dims, spelling, merged)
    untied = head.untie(target, merged, dims, spelling) if dims.tied else {}
    target = target.replace(tensors={**target.tensors, **around.tensors, **untied})
    target, replaced = replace_saved(target, merged, known, spelling)
    target = fit_vocabulary(target, dims, spelling, inputs.embedding())
    target = merge(target, merged, dims, spelling)
    config, rope_notes = with_rope_type(around.config, dims.family.defaults)
    told = (note for adapter in merged for note in adapter.notes)
    computed = computed_note(target, found.layout, to)
    notes = (*target.notes, *told, *around.notes, *rope_notes, *computed)
    if to is HF and dtype is None and computed_dtype is None:
        notes += mixed_note(target)
    target = target.replace(
        config=head.untied_config(config) if untied else config,
        tensors=_in_order(target.tensors, inputs.reference),
        notes=(*notes, *bases.notes),
        files=files_of_both(inputs.source.files, inputs.reference.files),
    )
    reasons = bases.unused()
    reasons |= {id(t): reason for adapter in merged for t, reason in adapter.unused}
    reasons |= {id(step): _REPLACED for tensor in replaced for step in ancestry(tensor)}
    plan = plan_of(target, inputs, donor, {**reasons, **around.reasons})
    layouts = {"from": found.layout.name, "to": to.name}
    return Job(plan, to, dims, merged, before, bases.names, details={"layouts": layouts})


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


def _untied() -> ConfigError:
    """Untied heads have no place where the weights are or become Tunix's."""
    return ConfigError(
        "config.json: tie_word_embeddings is false, but Tunix's models have no head beside "
        "the embedding: it would be lost",
        "set it to true if the model's head is its embedding",
    )


def _in_order(tensors: Mapping[str, Tensor], base: Checkpoint) -> dict[str, Tensor]:
    """The tensors in the base's order, those that it does not have last."""
    order = {name: position for position, name in enumerate(base)}
    return dict(sorted(tensors.items(), key=lambda item: order.get(item[0], len(order))))
