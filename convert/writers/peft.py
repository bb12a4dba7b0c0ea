"""Write a PEFT directory: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert.readers.safetensors import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from gemma_convert.convert.tensor import Tensor
from gemma_convert.convert.writers.safetensors import (
    Progress,
    Shard,
    Written,
    write_shard,
)


def write_peft(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path, progress: Progress
) -> Written:
    """Write an adapter into ``directory`` and read it back.

    Args:
        tensors: By PEFT's names.
        config: adapter_config.json.
        directory: An empty directory, or one that an earlier call left.
        progress: Called with bytes as they are written and as they are read back.

    Raises:
        OutputError: If what is read back is not what was written.
    """
    shard = Shard(ADAPTER_NAME, tensors)
    (directory / shard.name).unlink(missing_ok=True)  # an interrupted run's
    written = write_shard(directory, shard, progress)
    text = json.dumps(config, indent=2) + "\n"
    (directory / ADAPTER_CONFIG_NAME).write_text(text, encoding="utf-8")
    return written
