"""The merged directory in a real server: vLLM's greedy tokens are those of transformers.

Run with ``pytest -m server -s tests/server``. Both compute in float32: in bfloat16 exact ties
between two tokens fall either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.real import oracle
from tests.server.vllm_cpu import Server, serve

pytestmark = [
    pytest.mark.server,
    # Of flax, jax, optax and orbax inside Tunix; the server and the command run on their own.
    pytest.mark.filterwarnings("ignore"),
]

PROMPTS = ("Water boils at", "The lighthouse keeper wrote")
TOKENS = 32


@pytest.fixture(scope="module")
def server(merged_bfloat16: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A vLLM server of the merged directory."""
    with serve(merged_bfloat16, tmp_path_factory.mktemp("vllm") / "server.log") as running:
        print(f"\nvLLM was ready after {running.ready_s:.0f} s")
        yield running


def test_greedy_tokens_equal_transformers(
    server: Server, merged_bfloat16: Path, tokenize: Callable[[str], list[int]]
) -> None:
    model = oracle.hf_model(merged_bfloat16)
    for prompt in PROMPTS:
        ids = tokenize(prompt)
        found = server.complete(ids, TOKENS)
        print(f"\n{prompt!r} -> {found['text']!r}")
        assert found["token_ids"] == oracle.hf_greedy(model, ids, TOKENS), prompt


def test_text_is_tokenized_with_one_bos(
    server: Server, tokenize: Callable[[str], list[int]]
) -> None:
    for prompt in PROMPTS:
        found = server.complete(prompt, 1)
        assert found["prompt_token_ids"] == tokenize(prompt)
