"""An exported adapter in a real server: vLLM's greedy tokens are those of transformers with PEFT.

Run with ``pytest -m server -s tests/server``. Tunix trained the adapter; `orbax-to-peft` wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import run_cli
from tests.real import oracle, tunix_lora
from tests.server.vllm_cpu import Server, serve

pytestmark = [
    pytest.mark.server,
    # Of flax, jax, optax and orbax inside Tunix; the server runs on its own.
    pytest.mark.filterwarnings("ignore"),
]

PROMPTS = ("Water boils at", "The lighthouse keeper wrote")
TOKENS = 32


@dataclass(frozen=True)
class Served:
    """A server of the base and, under the name ``tuned``, of the exported adapter."""

    server: Server
    adapter: Path


@pytest.fixture(scope="module")
def served(base: Path, lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("vllm")
    adapter = directory / "adapter"
    words = ["orbax-to-peft", lora.parent, "--base", base, "--out", adapter, "--quiet"]
    assert run_cli(*words, "--alpha", tunix_lora.ALPHA) == 0
    with serve(base, directory / "server.log", adapters={"tuned": adapter}) as running:
        print(f"\nvLLM was ready after {running.ready_s:.0f} s")
        yield Served(running, adapter)


def test_greedy_tokens_equal_peft(
    served: Served, base: Path, tokenize: Callable[[str], list[int]]
) -> None:
    from peft import PeftModel

    plain = oracle.hf_model(base)
    prompts = {prompt: tokenize(prompt) for prompt in PROMPTS}
    before = {prompt: oracle.hf_greedy(plain, ids, TOKENS) for prompt, ids in prompts.items()}
    tuned = PeftModel.from_pretrained(plain, served.adapter).eval()
    for prompt, ids in prompts.items():
        found = served.server.complete(ids, TOKENS, "tuned")
        print(f"\n{prompt!r} -> {found['text']!r}")
        assert found["token_ids"] == oracle.hf_greedy(tuned, ids, TOKENS), prompt
        assert found["token_ids"] != before[prompt], "the adapter does nothing"
        assert served.server.complete(ids, TOKENS)["token_ids"] == before[prompt]
