"""Fixtures of the tests on real weights, for the conftest.py of each folder that needs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real import tunix_lora
from tests.real.gemma_270m import BOS, hf_directory
from tests.real.oracle import Array

LICENSE = Path(__file__).parents[2] / "LICENSE"
# Past Gemma 3 270M's sliding window of 512 tokens.
LONG = 700
GREEDY = 12


def convert(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``gemma-convert orbax-to-hf`` as a user would."""
    command = [sys.executable, "-m", "gemma_convert", "orbax-to-hf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def convert_lora(source: Path, base: Path, out: Path, *options: str) -> Path:
    """Merge the trained LoRA into ``out``, which must succeed."""
    alpha = f"{tunix_lora.ALPHA:g}"
    done = convert(source, "--base", base, "--out", out, "--alpha", alpha, *options)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def base() -> Path:
    """The real base model, in bfloat16."""
    return hf_directory()


@pytest.fixture(scope="session")
def lora() -> Path:
    """The step directory of the LoRA that Tunix trained on the base."""
    return tunix_lora.checkpoint()


@pytest.fixture(scope="session")
def merged_float32(base: Path, lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command's merge of the step directory, in float32."""
    out = tmp_path_factory.mktemp("float32") / "merged"
    return convert_lora(lora, base, out, "--dtype", "float32")


@pytest.fixture(scope="session")
def merged_bfloat16(base: Path, lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command's merge of the newest step, in the base's own dtype."""
    return convert_lora(lora.parent, base, tmp_path_factory.mktemp("bfloat16") / "merged")


@pytest.fixture(scope="session")
def tokenize(base: Path) -> Callable[[str], list[int]]:
    """Text to token ids that begin with exactly one BOS."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)

    def encode(text: str) -> list[int]:
        ids = list(tokenizer(text).input_ids)
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
        return ids

    return encode


@pytest.fixture(scope="session")
def prompts(tokenize: Callable[[str], list[int]]) -> dict[str, list[int]]:
    """A short prompt and one that is longer than the sliding window."""
    long = tokenize(LICENSE.read_text())[:LONG]
    assert len(long) == LONG
    return {"short": tokenize("Water boils at"), "long": long}


@dataclass(frozen=True)
class Tunix:
    """What Tunix itself computes, in float32: logits by prompt, greedy tokens, restored factors."""

    base: dict[str, Array]
    merged: dict[str, Array]
    greedy: list[int]
    factors: dict[str, Array]


@pytest.fixture(scope="session")
def tunix(base: Path, lora: Path, prompts: dict[str, list[int]]) -> Tunix:
    """Tunix's own numbers; its models are freed before transformers' are made."""
    model = tunix_lora.restored_model(base, lora)
    return Tunix(
        base=_logits(tunix_lora.base_model(base), prompts),
        merged=_logits(model, prompts),
        greedy=tunix_lora.greedy(model, prompts["short"], GREEDY),
        factors=tunix_lora.factors(model),
    )


def _logits(model: Any, prompts: dict[str, list[int]]) -> dict[str, Array]:
    return {name: tunix_lora.logits(model, ids) for name, ids in prompts.items()}
