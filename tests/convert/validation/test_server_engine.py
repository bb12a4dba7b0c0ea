"""A server as an engine: a stand-in that answers as vLLM or OpenAI's API does, on loopback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.validation.engines.base import About, Logits
from gemma_convert.convert.validation.engines.server import connect
from gemma_convert.convert.validation.logits import validate_logits
from gemma_convert.convert.validation.prompts import Prompt
from gemma_convert.convert.validation.verdict import limits_for
from tests.stand_in import Answer, Serve

IDS = [2, *np.random.default_rng(1).integers(5, 40, 11).tolist()]
SCORES = np.random.default_rng(2).normal(0, 3, (len(IDS), 40)).astype(np.float32)
LOGPROBS = log_softmax(SCORES.astype(np.float64), -1)


def told(row: int, k: int, name: Callable[[int], str], value: Callable[[float], Any]) -> Any:
    """The best k of a row, and the token that follows in the prompt."""
    tokens = [int(t) for t in np.argsort(-LOGPROBS[row])[:k]]
    tokens += IDS[row + 1 : row + 2]
    return {name(t): value(float(LOGPROBS[row, t])) for t in tokens}


def vllm(body: dict[str, Any]) -> tuple[int, Any]:
    """As vLLM 0.32 answers ``prompt_logprobs``."""
    assert body["prompt"] == IDS
    assert body["model"] == "tiny"
    k = body["prompt_logprobs"]
    prompt = [
        told(i, k, str, lambda x: {"logprob": x, "rank": 1, "decoded_token": "?"})
        for i in range(len(IDS) - 1)
    ]
    after = told(len(IDS) - 1, k, "token_id:{}".format, float)
    choice = {"prompt_logprobs": [None, *prompt], "logprobs": {"top_logprobs": [after]}}
    return 200, {"choices": [choice]}


def echo(body: dict[str, Any]) -> tuple[int, Any]:
    """As a server answers that knows nothing of ``prompt_logprobs``."""
    if not body.get("echo"):
        return 200, {"choices": [{"logprobs": None}]}
    listed = [None, *(told(i, 5, "token_id:{}".format, float) for i in range(len(IDS)))]
    return 200, {"choices": [{"logprobs": {"top_logprobs": listed}}]}


def text(body: dict[str, Any]) -> tuple[int, Any]:
    """A server that names tokens by their text."""
    if not body.get("echo"):
        return 200, {"choices": [{}]}
    return 200, {"choices": [{"logprobs": {"top_logprobs": [None, {" the": -1.0}]}}]}


def none(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"choices": [{"logprobs": None}]}


def refuses(body: dict[str, Any]) -> tuple[int, Any]:
    return 400, {"error": "no logprobs today"}


@pytest.mark.parametrize(("answer", "k"), [(vllm, 20), (echo, 5)])
@pytest.mark.parametrize("keep", [list(range(len(IDS))), [0, 3, 11]])
def test_the_likeliest_tokens_come_back(
    answer: Answer, k: int, keep: list[int], serve: Serve
) -> None:
    server = connect(serve(answer), None, "float32")
    found = server.load().run(IDS, keep, layers=False)
    for i, position in enumerate(keep):
        best = np.argsort(-LOGPROBS[position])[:k]
        np.testing.assert_array_equal(found.ids[i, :k], best)
        np.testing.assert_allclose(found.logprobs[i, :k], LOGPROBS[position, best])
        if position + 1 < len(IDS):
            assert found.next_logprobs[i] == pytest.approx(LOGPROBS[position, IDS[position + 1]])
        else:
            assert np.isnan(found.next_logprobs[i])


class InMemory:
    """An engine whose scores are given."""

    about = About("memory", "transformers", "float32", "float32")

    def __init__(self, scores: Any) -> None:
        self._scores = scores

    def load(self) -> InMemory:
        return self

    def run(self, ids: list[int], keep: list[int], *, layers: bool) -> Logits:
        return Logits(self._scores[keep])


def test_a_server_is_judged_by_what_it_tells(serve: Serve) -> None:
    server = connect(serve(vllm), None, "float32")
    prompts = [Prompt("p", tuple(IDS)), Prompt("long", (2, *[5] * 20))]

    def judged(scores: Any) -> Any:
        limits = limits_for(InMemory.about, server.about)
        return validate_logits(InMemory(scores), server, prompts, limits, bos=2, layers=True)

    right = judged(SCORES)
    assert right.passed
    assert [p["prompt"] for p in right.data["prompts"]] == ["p"]
    assert "prompt 'long' was left out: 21 tokens" in right.notes[0]
    assert "KL is a lower bound" in right.notes[1]
    wrong = judged(SCORES[:, ::-1])
    assert [finding.where for finding in wrong.findings] == ["prompt p"]


def test_the_model_and_its_limit_are_asked_for(serve: Serve) -> None:
    server = connect(serve(vllm) + "/v1/", None, "bfloat16")
    assert (server.model, server.about.limit) == ("tiny", 12)
    assert server.about.name.endswith("/v1")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (text, "tokens come back as text (' the'), which cannot be told apart"),
        (none, "log probabilities came back behind 0 of 12 tokens"),
        (refuses, "400 Bad Request"),
    ],
)
def test_servers_that_cannot_be_used(answer: Answer, message: str, serve: Serve) -> None:
    server = connect(serve(answer), None, "float32")
    with pytest.raises(InputError) as caught:
        server.run(IDS, [0], layers=False)
    assert message in str(caught.value)


def test_nothing_there(serve: Serve) -> None:
    with pytest.raises(InputError, match="is the server running there"):
        connect("http://127.0.0.1:9", None, "float32")
    with pytest.raises(InputError, match="it serves no model"):
        connect(serve(vllm, {"data": []}), None, "float32")
    with pytest.raises(InputError, match="must be a JSON object, found list"):
        connect(serve(vllm, []), None, "float32")
