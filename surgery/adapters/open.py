"""Adapters as inputs of a job: whatever format they come in."""

from __future__ import annotations

from dataclasses import dataclass

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.peft import read_peft
from gemma_convert.surgery.adapters.qwix import read_qwix, split_factors, stored_alpha
from gemma_convert.surgery.trained_on import of_codes


@dataclass(frozen=True)
class Source:
    """A checkpoint that holds an adapter, and how much of it is wanted.

    Attributes:
        checkpoint: A PEFT directory or a Tunix checkpoint, without weights of its own.
        weight: What its deltas are multiplied by.
    """

    checkpoint: Checkpoint
    weight: float = 1.0

    @property
    def is_peft(self) -> bool:
        """Whether it is a PEFT directory."""
        return "adapter_config" in self.checkpoint.metadata

    @property
    def takes_alpha(self) -> bool:
        """Whether alpha must be given."""
        return not self.is_peft and stored_alpha(self.checkpoint.metadata) is None


def adapter_source(checkpoint: Checkpoint, weight: float = 1.0) -> Source:
    """``checkpoint`` as an adapter; weights that a Tunix checkpoint holds beside it are left out.

    Raises:
        AdapterError: If it holds no factors.
    """
    source = Source(checkpoint, weight)
    if source.is_peft:
        return source
    weights, pairs = split_factors(checkpoint)
    if not pairs:
        raise AdapterError(
            f"{checkpoint.source}: it holds no LoRA factors",
            "give a PEFT directory or a Tunix checkpoint with factors",
        )
    if not weights:
        return source
    note = f"{checkpoint.source}: used its LoRA factors, not the {len(weights)} weights beside them"
    own = {id(factor) for pair in pairs.values() for factor in pair.factors().values()}
    alone = checkpoint.replace(
        tensors={name: tensor for name, tensor in checkpoint.items() if id(tensor) in own},
        dropped={},
        metadata={**of_codes(weights).entry(), **checkpoint.metadata},
        notes=(*checkpoint.notes, note),
    )
    return Source(alone, weight)


def opened(source: Source, alpha: float | None = None) -> Adapter:
    """The adapter of a source, its weight applied.

    Args:
        source: From `adapter_source`.
        alpha: LoRA alpha of a Tunix checkpoint, where it does not say it, or the same.

    Raises:
        AdapterError: If it is not understood, see `read_peft` and `read_qwix`, or says another
            alpha.
    """
    checkpoint = source.checkpoint
    if source.is_peft and alpha is not None:
        raise AdapterError(
            f"{checkpoint.source}: --alpha {alpha:g}: its adapter_config.json says the scale",
            "leave --alpha out",
        )
    if source.is_peft:
        return read_peft(checkpoint).weighted(source.weight)
    pairs = split_factors(checkpoint)[1]
    adapter = read_qwix(pairs, checkpoint.metadata, alpha, checkpoint.source)
    return adapter.weighted(source.weight)
