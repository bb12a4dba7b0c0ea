"""Two engines on the same ids: tiny models on the disk, ways to spoil them, the comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from gemma_convert.convert.tensor import Array
from gemma_convert.convert.validation.engines.choose import Options
from gemma_convert.convert.validation.result import Result
from gemma_convert.convert.validation.setup_logits import Request, compare_logits
from tests import tiny
from tests.tiny_cases import Case

DEEP = Case(
    "gemma3",
    "LLLLLGLLLLLG",
    "Gemma3TextConfig",
    {"query_pre_attn_scalar": 14, "max_position_embeddings": 4096},
    {},
)


def ids(count: int) -> list[int]:
    return [2, *np.random.default_rng(count).integers(5, 509, count - 1).tolist()]


def save(case: Case, directory: Path, seed: int = 0) -> Path:
    import transformers

    config = getattr(transformers, case.hf_class)(**case.hf_config)
    tiny.hf_random(config, seed).save_pretrained(directory)
    return directory


Spoil = Callable[[dict[str, Array]], None]


def spoilt(right: Path, out: Path, change: Spoil) -> Path:
    """A copy of ``right`` with other weights."""
    shutil.copytree(right, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    contiguous = {name: np.ascontiguousarray(array) for name, array in weights.items()}
    save_file(contiguous, out / "model.safetensors", metadata={"format": "pt"})
    return out


def with_config(right: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(right, out)
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


def compared(a: Path | str, b: Path | str, prompts: Path, **options: Any) -> Result:
    given = Options(**options)
    return compare_logits(Request(str(a), str(b), given, given, prompts, layers=True))


def wheres(result: Result) -> list[str]:
    return [finding.where for finding in result.findings]


def norm_off_by_one(weights: dict[str, Array]) -> None:
    weights["model.layers.7.pre_feedforward_layernorm.weight"] += 1
