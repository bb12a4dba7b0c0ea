"""The main jobs as compositions of lazy steps: open, split, relayout, merge, cast.

Nothing is read here but headers, LoRA factors and, where a tied model has a head on disk, that
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError, ConfigError, InputError, LayoutError
from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.model import Model, read_model, text_config
from gemma_convert.convert.plan import Plan, make_plan, reached
from gemma_convert.convert.registry import detect, families
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, blocks, cast
from gemma_convert.convert.vocabulary import as_stored, embedding_name, fit_vocabulary
from gemma_convert.surgery.adapter import Adapter, check_values, resolve_alpha, split_factors
from gemma_convert.surgery.merge_lora import merge

DType = np.dtype[Any]


@dataclass(frozen=True)
class Job:
    """A plan, and what it was made for.

    Attributes:
        plan: What will be written.
        model: The dimensions.
        adapter: The LoRA adapter that is merged, if there is one.
    """

    plan: Plan
    model: Model
    adapter: Adapter | None = None


def orbax_to_hf(
    checkpoint: Checkpoint,
    base: Checkpoint,
    *,
    alpha: float | None = None,
    dtype: DType | None = None,
) -> Job:
    """A Tunix checkpoint (weights, LoRA factors, or both) as a Hugging Face checkpoint.

    Args:
        checkpoint: Orbax tree in Tunix's layout.
        base: HF directory that gives config and side files and, where ``checkpoint`` has no
            weights of its own, the weights.
        alpha: LoRA alpha, where the checkpoint's metadata does not say it.
        dtype: Stored dtype; as in the source if None.

    Raises:
        GemmaConvertError: If the two do not fit together; see the steps.
    """
    if checkpoint.format == "safetensors":
        raise InputError(f"{checkpoint.source}: safetensors already", "give an Orbax checkpoint")
    model = read_model(_config(base), families())
    weights, pairs = split_factors(checkpoint)
    text, rest, dropped = _split_base(base, model)
    spelling = _hf_spelling(base, model, text)
    if weights:
        _require_tied(model)
        spelled = detect(weights, checkpoint.source)
        stored = as_stored(model, weights, spelled)
        target = relayout(weights, stored, spelled, spelling)
        embedding = text.get(embedding_name(model, spelling))
        target = fit_vocabulary(target, model, spelling, embedding)
        read = reached(target)
        own = {name: tensor for name, tensor in text.items() if id(tensor) not in read}
        dropped |= dict.fromkeys(own, "the checkpoint has its own weights")
    elif text:
        target = relayout(base.replace(tensors=text), model, spelling, spelling)
    else:
        raise InputError(
            f"{base.source}: no weights, and {checkpoint.source} holds LoRA factors alone",
            "give the base's safetensors with --base",
        )
    adapter = None
    if pairs:
        source = checkpoint.source
        value = resolve_alpha(checkpoint.metadata, alpha, source)
        adapter = Adapter(pairs, value, Spelling(TUNIX, ""), source)
        check_values(adapter)
        target = merge(target, [adapter], model, spelling, dtype)
    elif alpha is not None:
        raise AdapterError(
            f"{checkpoint.source}: it holds no LoRA factors that --alpha {alpha:g} could scale",
            "give the checkpoint with the factors, or leave --alpha out",
        )
    tensors = _in_order({**target.tensors, **rest}, base)
    target = base.replace(
        tensors={name: _stored(tensor, dtype) for name, tensor in tensors.items()},
        dropped={**checkpoint.dropped, **dropped},
        notes=target.notes,
    )
    return Job(make_plan(target, (checkpoint, base)), model, adapter)


def hf_to_orbax(base: Checkpoint, *, dtype: DType | None = None) -> Job:
    """A Hugging Face checkpoint as an Orbax tree in Tunix's layout.

    Args:
        base: HF directory.
        dtype: Stored dtype; as in the source if None.

    Raises:
        GemmaConvertError: If config and tensors do not fit together.
    """
    model = read_model(_config(base), families())
    text, rest, dropped = _split_base(base, model)
    if not text:
        raise InputError(f"{base.source}: no weights", "give a directory with safetensors")
    _require_tied(model)
    spelling = _hf_spelling(base, model, text)
    tunix = Spelling(TUNIX, "")
    target = relayout(base.replace(tensors=text), model, spelling, tunix)
    target = fit_vocabulary(target, model, tunix)
    dropped |= dict.fromkeys(rest, "not part of the text model, which is all that is converted")
    target = target.replace(
        tensors={name: _stored(tensor, dtype) for name, tensor in target.items()},
        dropped=dropped,
    )
    return Job(make_plan(target, (base,)), model)


def _config(base: Checkpoint) -> dict[str, Any]:
    if not base.config:
        raise InputError(
            f"{base.source}: no config.json", "give the base model's Hugging Face directory"
        )
    return dict(base.config)


def _split_base(
    base: Checkpoint, model: Model
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """The text parameters of an HF checkpoint, what is beside them, and what is dropped."""
    if not base:
        return {}, {}, {}
    spelling = detect(base, base.source)
    if spelling.layout is not HF:
        raise LayoutError(
            f"{base.source}: the base is in layout {spelling.layout.name}",
            "give a Hugging Face directory",
        )
    text = {name: t for name, t in base.items() if name.startswith(spelling.prefix)}
    rest = {name: t for name, t in base.items() if name not in text}
    dropped: dict[str, str] = {}
    for name in [n for n in rest if n.endswith("lm_head.weight")]:
        if model.tied:
            _check_tied(base, name, spelling)
            del rest[name]
            dropped[name] = "tied to the embedding: written once"
    return text, rest, dropped


def _require_tied(model: Model) -> None:
    """Refuse models with a head of their own where the weights are or become Tunix's."""
    if not model.tied:
        raise ConfigError(
            "config.json: tie_word_embeddings is false, but Tunix's models have no head beside "
            "the embedding: it would be lost",
            "set it to true if the model's head is its embedding",
        )


def _check_tied(base: Checkpoint, head: str, spelling: Spelling) -> None:
    name = f"{spelling.prefix}embed_tokens.weight"
    if name not in base:
        raise LayoutError(
            f"{base.source}: {head} is there, but not {name}, to which config.json ties it",
            "the checkpoint is incomplete: download it again",
        )
    embedding = base[name]
    same = base[head].shape == embedding.shape and base[head].dtype == embedding.dtype
    if not same or not all(
        base[head].read(box).tobytes() == embedding.read(box).tobytes() for box in blocks(embedding)
    ):
        raise LayoutError(
            f"{base.source}: {head} differs from the embedding, but config.json ties them",
            "set tie_word_embeddings to false if the head is meant to be its own, "
            "or remove the tensor",
        )


def _hf_spelling(base: Checkpoint, model: Model, text: dict[str, Tensor]) -> Spelling:
    """As the base spells its tensors; without tensors, as the Hub does for such a config."""
    if text:
        return detect(text, base.source)
    nested = text_config(base.config) is not base.config
    return Spelling(HF, model.family.nested_prefix if nested else HF.default_prefix)


def _in_order(tensors: dict[str, Tensor], base: Checkpoint) -> dict[str, Tensor]:
    """The tensors in the base's order, those that it does not have last."""
    order = {name: position for position, name in enumerate(base)}
    return dict(sorted(tensors.items(), key=lambda item: order.get(item[0], len(order))))


def _stored(tensor: Tensor, dtype: DType | None) -> Tensor:
    if dtype is None or not dtypes.is_float(tensor.dtype):
        return tensor
    return cast(tensor, dtype)
