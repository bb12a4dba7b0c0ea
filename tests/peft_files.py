"""PEFT adapters written by hand, with the safetensors library and json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.tensor import Array
from tests.checkpoints import F32, memory

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 5}


def in_memory(values: Mapping[str, Array], **config: Any) -> Checkpoint:
    """An adapter as `open_checkpoint` would open it."""
    adapter_config = {**CONFIG, **config}
    return memory(values, source="run", metadata={"adapter_config": adapter_config})


def write(directory: Path, values: Mapping[str, Array], **config: Any) -> Path:
    """An adapter directory."""
    directory.mkdir(parents=True)
    save_file(dict(values), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**CONFIG, **config})
    (directory / "adapter_config.json").write_text(text)
    return directory


def factors(path: str, inputs: int, outputs: int, rank: int = 2, seed: int = 0) -> dict[str, Array]:
    """Random factors of one linear module, by PEFT's names behind ``base_model.model.``."""
    random = np.random.default_rng([seed, *path.encode()])
    stem = f"base_model.model.{path}"
    return {
        f"{stem}.lora_A.weight": random.normal(0, 0.3, (rank, inputs)).astype(F32),
        f"{stem}.lora_B.weight": random.normal(0, 0.3, (outputs, rank)).astype(F32),
    }
