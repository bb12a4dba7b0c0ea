"""Who writes the shards of an output: this process, or others that hand over what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_convert.convert.awaited import bring
from gemma_convert.convert.tensor import all_findings
from gemma_convert.convert.writers.safetensors import Progress, Shard, Written, write_shard


@dataclass(frozen=True)
class Finished:
    """A shard that is on the disk under its name.

    Attributes:
        written: What it became.
        findings: What reading its tensors has told; see `all_findings`.
    """

    written: Written
    findings: Mapping[str, Sequence[Mapping[str, Any]]]


Engine = Callable[[Path, Sequence[Shard], Progress], Iterator[Finished]]
"""Writes shards into a directory, in whatever order. Each comes as soon as it is finished, and the
shard's tensors then know its findings."""


def in_process(directory: Path, shards: Sequence[Shard], progress: Progress) -> Iterator[Finished]:
    """The engine that writes them here, one behind the other."""
    bring({name: tensor for part in shards for name, tensor in part.tensors.items()})
    for part in shards:
        written = write_shard(directory, part, progress)
        yield Finished(written, all_findings(part.tensors))
