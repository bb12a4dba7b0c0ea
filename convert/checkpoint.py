"""A checkpoint: names to tensors not yet read, and what lies beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gemma_convert.convert.tensor import Tensor


@dataclass(frozen=True)
class Checkpoint(Mapping[str, Tensor]):
    """Names to tensors, with the config and side files of the directory they came from.

    Attributes:
        tensors: Name to tensor, in the order they are to be written.
        config: ``config.json`` as read; empty where the format has none.
        files: Side files to carry along (tokenizer, chat template, ...): name to path.
        source: Where it was opened, for messages and the ledger.
        format: ``safetensors``, ``orbax`` or ``memory``.
        metadata: The format's own metadata: Orbax's custom metadata, adapter_config.json.
        dropped: Names of source tensors left out on purpose, each with the reason.
        notes: What a user should know about how this was opened or made.
        fingerprint: What identifies the source's files: name to digest.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    source: str = ""
    format: str = "memory"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def replace(self, **changes: Any) -> Checkpoint:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())
