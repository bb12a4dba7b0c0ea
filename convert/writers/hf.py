"""Write a Hugging Face directory: shards, index, config and side files."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from gemma_convert.convert import dtypes, hf_config
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.digests import sha256_of
from gemma_convert.convert.tensor import Tensor, recall_all
from gemma_convert.convert.writers.engine import Engine, in_process
from gemma_convert.convert.writers.journal import Journal
from gemma_convert.convert.writers.safetensors import (
    Progress,
    Shard,
    Written,
    shard,
    write_index,
)
from gemma_convert.convert.writers.sync import sync


def write_hf(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    max_shard_bytes: int,
    progress: Progress,
    journal: Journal | None = None,
    engine: Engine = in_process,
) -> list[Written]:
    """Write ``checkpoint`` into ``directory`` and read it back.

    Args:
        checkpoint: Tensors by their Hugging Face names, config and side files.
        directory: An empty directory, or one that an earlier call with this journal left.
        max_shard_bytes: Limit of one file's tensors.
        progress: Called with bytes as they are written and as they are read back.
        journal: Where the shards that it says are finished are not written again.
        engine: Who writes the shards.

    Raises:
        OutputError: If what is read back is not what was written.
    """
    journal = journal or Journal()
    shards = shard(checkpoint.tensors, max_shard_bytes)
    written = _write_shards(directory, shards, progress, journal, engine)
    write_index(directory, shards)
    config = hf_config.updated(checkpoint.config, main_dtype(checkpoint.tensors))
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    for name, path in checkpoint.files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, directory / name)
    return written


def _write_shards(
    directory: Path, shards: list[Shard], progress: Progress, journal: Journal, engine: Engine
) -> list[Written]:
    """Have ``engine`` write those shards of which the journal does not say that they are there."""
    written = {part.name: _found(directory, part, progress, journal) for part in shards}
    missing = [part for part in shards if written[part.name] is None]
    for part in missing if journal.path is not None else ():
        (directory / part.name).unlink(missing_ok=True)  # cut off by the end of the process
    for piece in engine(directory, missing, progress):
        name = piece.written.name
        written[name] = piece.written
        sync(directory)  # else a journal could name a file that a power cut took away
        journal.finish(name, {**asdict(piece.written), "findings": piece.findings})
    return [found for found in written.values() if found is not None]


def _found(directory: Path, part: Shard, progress: Progress, journal: Journal) -> Written | None:
    """A shard that an earlier run finished, if it is still what that run wrote."""
    path, record = directory / part.name, journal.pieces.get(part.name)
    if record is None or not path.is_file() or sha256_of(path) != record["sha256"]:
        return None
    recall_all(part.tensors, record["findings"])
    progress(2 * part.nbytes)
    return Written(part.name, record["nbytes"], record["sha256"])


def main_dtype(tensors: Mapping[str, Tensor]) -> str:
    """The floating-point dtype of most weights, as config.json spells it."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if dtypes.is_float(tensor.dtype):
            sizes[dtypes.to_config(tensor.dtype)] += tensor.size
    return sizes.most_common(1)[0][0]
