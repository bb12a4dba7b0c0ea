"""``validate logits`` with a real vLLM as the second engine.

Run with ``pytest -m server -s tests/server``; the printed numbers are those of docs/validation.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.tunix_lora import ALPHA
from tests.server.vllm_cpu import Server, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore"),  # of Tunix, which trains the LoRA
]


@pytest.fixture(scope="module")
def server(merged_bfloat16: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A vLLM server of the merged directory, in float32."""
    with serve(merged_bfloat16, tmp_path_factory.mktemp("vllm") / "server.log") as running:
        yield running


def validate(a: Path, server: Server, *words: str | Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "gemma_convert", "validate", "logits", a, server.url]
    command += ["--dtype-b", "float32", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    for prompt in found["prompts"]:
        keys = ("tokens", "max_abs", "mean_abs", "mean_kl", "top1_agreement", "worst_rank")
        told = ", ".join(f"{key} {prompt[key]:.3g}" for key in keys)
        print(f"\n{prompt['prompt']}: {told}")
    return done.returncode, found


def test_vllm_agrees_with_transformers(merged_bfloat16: Path, server: Server) -> None:
    code, result = validate(merged_bfloat16, server)
    assert code == 0, result["findings"]
    # the server takes 1024 tokens, so the longest prompt is left out and said to be
    assert [p["prompt"] for p in result["prompts"]] == ["short", "code", "languages", "window"]
    assert any("'long' was left out: 2048 tokens" in note for note in result["notes"])
    assert result["worst"]["top1"] == 1.0


def test_vllm_serves_another_model_than_the_base(base: Path, server: Server) -> None:
    code, result = validate(base, server)
    assert code == 1
    assert {f["where"] for f in result["findings"]} >= {"prompt short", "prompt window"}


def test_vllm_agrees_with_tunix_and_the_factors(base: Path, lora: Path, server: Server) -> None:
    """The whole way: what was trained against what is served, merged to bfloat16."""
    words = ["--base", base, "--alpha", f"{ALPHA:g}", "--mean-kl", "1e-2", "--top1", "0.95"]
    code, result = validate(lora, server, *words, "--max-abs", "inf")
    assert code == 0, result["findings"]
