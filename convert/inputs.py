"""The inputs of a conversion, taken apart and checked against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemma_convert.convert import dtypes
from gemma_convert.convert.bases import Bases, choose
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError, InputError, LayoutError
from gemma_convert.convert.joined_config import joined_config
from gemma_convert.convert.layouts import HF, Layout, Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.parts import Parts, take_apart
from gemma_convert.convert.registry import families, named_model
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor
from gemma_convert.convert.vocabulary import as_stored, embedding_name
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.open import Source
from gemma_convert.surgery.training_base import Choice


@dataclass(frozen=True)
class Inputs:
    """What a conversion reads.

    Attributes:
        source: The checkpoint to convert.
        base: HF directory beside it, if there is one; its config.json is that of the two.
        adapters: More adapters to merge.
        model: The dimensions.
        own: What ``source`` holds.
        other: What ``base`` holds.
    """

    source: Checkpoint
    base: Checkpoint | None
    adapters: Sequence[Source]
    model: Model
    own: Parts
    other: Parts | None

    @property
    def reference(self) -> Checkpoint:
        """Whose config.json counts: the base, or a source that is its own; see `joined_config`."""
        return self.source if self.base is None else self.base

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All that is read: source, base, adapters."""
        base = () if self.base is None else (self.base,)
        return (self.source, *base, *(adapter.checkpoint for adapter in self.adapters))

    def held(self) -> Iterator[tuple[Checkpoint, Parts]]:
        """Source and base, each with its parts."""
        yield self.source, self.own
        if self.base is not None and self.other is not None:
            yield self.base, self.other

    def weights(
        self, quantization: Choice, merged: Sequence[Adapter]
    ) -> tuple[Bases, Parts, Spelling]:
        """Onto what adapters are merged, whose weights those are and how they are spelled.

        Args:
            quantization: How training quantised the base, as asked for; see `choose`.
            merged: The adapters.

        Raises:
            InputError: If neither source nor base has weights.
            AdapterError: If the choice does not fit.
        """
        bases = choose(self.own, self.other, quantization, merged)
        if bases is None or bases.donor.spelling is None:
            raise InputError(
                f"{self.reference.source}: no weights"
                + (
                    f", and {self.source.source} holds LoRA factors alone" if self.own.pairs else ""
                ),
                "give the directory with the base's safetensors",
            )
        return bases, bases.donor, bases.donor.spelling

    def spare(self, spelling: Spelling, dtype: dtypes.DType | None) -> Checkpoint | None:
        """The base's weights in ``spelling``, to take from them what the source lacks.

        None where nothing can lack: a model all of whose parameters are read.
        """
        other, model = self.other, self.model
        dead = any(parameter.unread for parameter in model.parameters())
        if other is None or other.spelling is None or not other.text or not dead:
            return None
        stored = as_stored(model, other.text, other.spelling)
        own = other.spelling
        # a tensor a layer, and none where the base has none either
        return relayout(other.text, stored, own, spelling, dtype=dtype, partial=True, by_layer=True)

    def embedding(self) -> Tensor | None:
        """The base's embedding."""
        if self.other is None or self.other.spelling is None:
            return None
        return self.other.text.get(embedding_name(self.model, self.other.spelling))


def read_inputs(
    source: Checkpoint,
    base: Checkpoint | None,
    adapters: Sequence[Source] = (),
    *,
    model: str | None = None,
    layout: Layout | None = None,
) -> Inputs:
    """Take the inputs of a conversion apart.

    Args:
        source: Weights, LoRA factors, or both.
        base: HF directory.
        adapters: More adapters.
        model: Name of a public model, where there is no config.json.
        layout: The layout of ``source``; told from its names if None.

    Raises:
        GemmaConvertError: If they do not fit together.
    """
    known = model_of(base if base is not None and not source.config else source, model)
    own = take_apart(source, known, layout)
    if base is not None and source.config and own.text:
        if base.config and model_of(base, None).family is not known.family:
            raise ConfigError(
                f"{base.source}: config.json is not of {known.family.name}, as {source.source} is",
                "give the base that the weights were trained from, or leave --base out",
            )
        lacking = {tower.part for tower in known.family.towers}
        lacking -= {found.tower.part for found in own.known}
        base = base.replace(config=joined_config(source.config, base.config, lacking))
    dims = model_of(source if base is None else base, model)
    other = _base_parts(base, dims) if base is not None else None
    inputs = Inputs(source, base, adapters, dims, own, other)
    for _, parts in inputs.held():
        _require_plain_weights(parts)
    return inputs


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
    if name is None and "adapter_config" in reference.metadata:
        raise InputError(
            f"{reference.source}: a PEFT adapter, not a model",
            "merge it with surgery merge-lora, or convert it with peft-to-orbax",
        )
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
