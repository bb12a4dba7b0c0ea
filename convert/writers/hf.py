"""Write a Hugging Face directory: shards, index, config and side files."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from gemma_convert.convert import dtypes, hf_config
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.tensor import Tensor
from gemma_convert.convert.writers.safetensors import (
    Progress,
    Written,
    shard,
    verify_shard,
    write_index,
    write_shard,
)


def write_hf(
    checkpoint: Checkpoint, directory: Path, *, max_shard_bytes: int, progress: Progress
) -> list[Written]:
    """Write ``checkpoint`` into an empty ``directory`` and read it back.

    Args:
        checkpoint: Tensors by their Hugging Face names, config and side files.
        directory: An empty directory.
        max_shard_bytes: Limit of one file's tensors.
        progress: Called with bytes as they are written and as they are read back.

    Raises:
        OutputError: If what is read back is not what was written.
    """
    shards = shard(checkpoint.tensors, max_shard_bytes)
    written: list[Written] = []
    for part in shards:
        written.append(write_shard(directory, part, progress))
        verify_shard(directory, part, written[-1], progress)
    write_index(directory, shards)
    config = hf_config.updated(checkpoint.config, main_dtype(checkpoint.tensors))
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    for name, path in checkpoint.files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, directory / name)
    return written


def main_dtype(tensors: Mapping[str, Tensor]) -> str:
    """The floating-point dtype of most weights, as config.json spells it."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if dtypes.is_float(tensor.dtype):
            sizes[dtypes.to_config(tensor.dtype)] += tensor.size
    return sizes.most_common(1)[0][0]
