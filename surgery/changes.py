"""Two checkpoints of one model brought to one spelling, and where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from ml_dtypes import finfo

from gemma_convert.convert.carry import around, known_names
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.hf_form import HEAD
from gemma_convert.convert.layouts import HF, LAYOUTS, Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.parts import Parts, take_apart
from gemma_convert.convert.registry import families
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Array, Tensor, ancestry, blocks, slices
from gemma_convert.convert.values import Revalued
from gemma_convert.convert.vocabulary import embedding_name, vocabulary
from gemma_convert.surgery.adapters.peft_keys import weight_name


@dataclass(frozen=True)
class Place:
    """One weight in both checkpoints.

    Attributes:
        name: In the spelling of the adapter to be made.
        tuned: After the training.
        base: Before.
        parameter: What it is or is a part of; None outside the text model.
        at: The part.
    """

    name: str
    tuned: Tensor
    base: Tensor
    parameter: Parameter | None
    at: Mapping[str, int]

    @property
    def new_rows(self) -> int:
        """Rows that the tuned one has beyond the base's; negative if it has fewer."""
        return self.tuned.shape[0] - self.base.shape[0] if self.tuned.shape else 0

    def differs(self) -> bool:
        """Whether any value does that both have, by more than a layout's rounding of it."""
        smaller = min(self.tuned, self.base, key=lambda tensor: tensor.size)
        for box in blocks(smaller):
            tuned, base = (t.read(box).astype(np.float32) for t in (self.tuned, self.base))
            slack = _slack(self.tuned, tuned) + _slack(self.base, base)
            with np.errstate(invalid="ignore"):  # NaN differs from everything
                if not (np.abs(tuned - base) <= slack).all():
                    return True
        return False

    def delta(self) -> Array:
        """Tuned - base, computed and kept in float32; the whole of it is in memory.

        Raises:
            AdapterError: If a value of it is NaN or infinite.
        """
        found = np.empty(self.tuned.shape, np.float32)
        for box in blocks(self.tuned):
            tuned, base = self.tuned.read(box), self.base.read(box)
            with np.errstate(over="ignore", invalid="ignore"):
                change = tuned.astype(np.float32) - base.astype(np.float32)
            if not np.isfinite(change).all():
                raise AdapterError(
                    f"{self.name}: the change has values that are NaN or infinite",
                    "the run diverged; take an earlier step",
                )
            found[slices(box)] = change
        return found


def places(
    tuned: Checkpoint, base: Checkpoint, model: Model, spelling: Spelling
) -> Iterator[Place]:
    """Every weight that both have, text model first; of a base that ties it, the head too.

    Args:
        tuned: In any layout.
        base: In any layout.
        model: The base's dimensions; the tuned one may have another number of tokens.
        spelling: The spelling to compare in.

    Raises:
        AdapterError: If one of them holds LoRA factors, or lacks a weight that the other has.
        LayoutError: If names or shapes are not the model's.
    """
    apart = [_weights(checkpoint, model) for checkpoint in (tuned, base)]
    text = [_respelled(parts, model, spelling) for parts in apart]
    for parameter in model.parameters():
        for short, at in parameter.parts(spelling.layout):
            name = spelling.prefix + short
            found = [side[name] for side in text if name in side]
            if len(found) == 2:
                yield Place(name, found[0], found[1], parameter, at)
            elif not parameter.unread:
                lacking = tuned if name in text[1] else base
                raise AdapterError(
                    f"{lacking.source}: {name} is missing, the other checkpoint has it",
                    "give two checkpoints of one model",
                )
    hf, like = Spelling(HF, HF.default_prefix), known_names(apart)
    towers = [
        {weight_name(name): tensor for name, tensor in around(parts, hf, like).items()}
        for parts in apart
    ]
    for name, tensor in towers[0].items():
        if name in towers[1]:
            yield Place(name, tensor, towers[1][name], None, {})
        elif name == HEAD and model.tied:
            yield Place(name, tensor, text[1][embedding_name(model, spelling)], None, {})


def _slack(tensor: Tensor, values: Array) -> Array | float:
    """How far the ``values`` of a tensor may be off, because its layout stores and rounds others.

    ``stored = scale * value + offset``, off by at most half an eps of its dtype and of float32.
    """
    slack: Array | float = 0.0
    for step in ancestry(tensor):
        if isinstance(step, Revalued) and step.may_lose:
            eps = float(finfo(step.parent.dtype).eps) + 2 * float(finfo(np.float32).eps)
            offset = abs(step.source.offset / step.source.scale)
            slack = slack + eps * (np.abs(values) + offset)
    return slack


def is_resized(place: Place, model: Model) -> bool:
    """Whether tokens were added or removed; layouts pad the embedding of one model differently."""
    rows = {place.tuned.shape[0], place.base.shape[0]}
    return not rows <= {vocabulary(model, layout) for layout in LAYOUTS.values()}


def _weights(checkpoint: Checkpoint, model: Model) -> Parts:
    config = checkpoint.config
    tied = read_model(config, families()).tied if config else model.tied
    parts = take_apart(checkpoint, replace(model, tied=tied))
    if parts.pairs or parts.spelling is None:
        raise AdapterError(
            f"{checkpoint.source}: it holds LoRA factors, where weights are compared",
            "merge them first, or take the adapter as it is: gemma-convert orbax-to-peft",
        )
    return parts


def _respelled(parts: Parts, model: Model, spelling: Spelling) -> Checkpoint:
    assert parts.spelling is not None
    embedding = parts.text.get(embedding_name(model, parts.spelling))
    if embedding is not None and embedding.shape:
        model = model.with_vocabulary(embedding.shape[0])
    return relayout(parts.text, model, parts.spelling, spelling, partial=True)
