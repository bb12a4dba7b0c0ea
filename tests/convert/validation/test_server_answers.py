"""Servers that misbehave: one line tells what came back, and the key stays where it belongs."""

from __future__ import annotations

import copy
import json
import random
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.validation.engines import server as engine
from gemma_convert.convert.validation.engines.base import About, Logits, TopK
from gemma_convert.convert.validation.engines.http import call, same_server
from gemma_convert.convert.validation.engines.server import Server, connect
from gemma_convert.convert.validation.metrics import compare
from tests.checkpoints import run_cli
from tests.stand_in import MODELS, Answer, Serve

IDS = [2, 7, 5, 11]
KEEP = [0, 1, 2, 3]
ONE = {"7": {"logprob": -0.5}, "9": {"logprob": -1.5}}
LAST = {"token_id:3": -0.25, "token_id:8": -2.0}


def right() -> dict[str, Any]:
    prompt = [None, ONE, {"5": {"logprob": -1.0}}, {"11": {"logprob": -0.125}}]
    return {"choices": [{"prompt_logprobs": prompt, "logprobs": {"top_logprobs": [LAST]}}]}


def always(value: Any) -> Answer:
    return lambda body: (200, value)


def choice(**changed: Any) -> dict[str, Any]:
    return {"choices": [{**right()["choices"][0], **changed}]}


def prompt(entry: Any) -> dict[str, Any]:
    return choice(prompt_logprobs=[None, ONE, entry, ONE])


DEEP = b'{"choices":' + b"[" * 200_000

WRONG: dict[str, tuple[Any, str]] = {
    "no choices": ({}, "choices: expected a list, found null"),
    "empty choices": ({"choices": []}, "choices: expected one, found []"),
    "choice is text": ({"choices": ["hello"]}, 'choices[0]: expected an object, found "hello"'),
    "prompt_logprobs is text": (choice(prompt_logprobs="x"), "prompt_logprobs: expected a list"),
    "null": (prompt(None), "log probabilities came back behind 3 of 4 tokens"),
    "empty": (prompt({}), "log probabilities came back behind 3 of 4 tokens"),
    "too few": (choice(prompt_logprobs=[None, ONE]), "behind 2 of 4 tokens"),
    "too many": (choice(prompt_logprobs=[None, *[ONE] * 4]), "behind 5 of 4 tokens"),
    "no last": (choice(logprobs=None), "behind 3 of 4 tokens"),
    "last is null": (choice(logprobs={"top_logprobs": [None]}), "behind 3 of 4 tokens"),
    "last is no list": (choice(logprobs={"top_logprobs": 3}), "top_logprobs: expected a list"),
    "entry is a list": (prompt([1]), "prompt_logprobs[2]: expected an object, found [1]"),
    "token is text": (prompt({"the": {"logprob": -1}}), 'expected a token id, found "the"'),
    "token is a superscript": (prompt({"\u00b2": {"logprob": -1}}), "expected a token id"),
    "token is negative": (prompt({"-4": {"logprob": -1}}), 'expected a token id, found "-4"'),
    "token is huge": (prompt({"9" * 40: {"logprob": -1}}), "expected a token id"),
    "logprob is text": (
        prompt({"5": {"logprob": "NaN"}}),
        'prompt_logprobs[2].5: expected a log probability, 0 or less, found "NaN"',
    ),
    "logprob is missing": (prompt({"5": {}}), "0 or less, found null"),
    "logprob is true": (prompt({"5": {"logprob": True}}), "0 or less, found true"),
    "logprob is above 0": (prompt({"5": {"logprob": 3.5}}), "0 or less, found 3.5"),
    "no object": (prompt({"5": -1.0}), "prompt_logprobs[2].5: expected an object, found -1.0"),
    "cut off": (json.dumps(right()).encode()[:-40], "bytes) is not valid JSON"),
    "nested": (DEEP, "is not valid JSON"),
    "a page": (b"<html>log in</html>", "the answer (text/plain, 19 bytes) is not valid JSON"),
    "no text": (b"\xff\xfe{}", "is not UTF-8"),
    "nothing": (b"", "is not valid JSON"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_told_in_one_line(case: str, serve: Serve) -> None:
    answer, message = WRONG[case]
    server = connect(serve(always(answer)), None, "float32")
    with pytest.raises(InputError) as caught:
        server.run(IDS, KEEP, layers=False)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{server.about.name}/completions: ")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"data": 3}, "data: expected a list, found 3"),
        ({"data": ["tiny"]}, 'data[0]: expected an object, found "tiny"'),
        ({"data": [{}]}, "data[0].id: expected a model's name, found null"),
        (
            {"data": [{"id": "x", "max_model_len": "9"}]},
            'max_model_len: expected a number of tokens, found "9"',
        ),
    ],
)
def test_models_that_are_none(models: Any, message: str, serve: Serve) -> None:
    with pytest.raises(InputError) as caught:
        connect(serve(always({}), models), None, "float32")
    assert message in str(caught.value)


@pytest.mark.parametrize("promised", ["1000000", "many"])
def test_a_body_that_ends_early(promised: str, serve: Serve) -> None:
    address = serve(always({}), b'{"data": [', headers={"Content-Length": promised})
    with pytest.raises(InputError, match="/models: "):
        connect(address, None, "float32")


def test_what_speaks_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(InputError, match=r"SSH-2\.0.*is the server running there"):
            connect(f"http://127.0.0.1:{listening.getsockname()[1]}", None, "float32")
        thread.join()


@pytest.mark.parametrize(
    "address",
    ["http://[::1", "http://user:pass@127.0.0.1", "http://", "http://a/v1?key=x", "http://a#b"],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InputError, match="expected scheme, host, port and path alone; give an"):
        connect(address, None, "float32")
    with pytest.raises(InputError, match="is the server running there"):
        connect("http://127.0.0.1:port", None, "float32")


def test_nothing_a_server_sends_is_a_bug_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random values anywhere in an answer: scores that can be compared, or one line."""
    chance = random.Random(3)
    server = Server(About("x", "server", "float32", "float32"), "tiny")
    full = Logits(np.random.default_rng(1).normal(size=(4, 13)).astype(np.float32))
    strange: list[Any] = [None, {}, [], "", "x", -1, 0.5, True, float("nan"), float("-inf"), 10**99]
    strange += [[None], {"7": None}, {"7": {"logprob": -1}}, {"token_id:7": -1}, ONE, LAST]
    compared = refused = 0
    for _ in range(2000):
        answer = copy.deepcopy(right())
        for _ in range(chance.randint(1, 2)):
            _spoil(answer, chance, strange)
        monkeypatch.setattr(engine, "call", lambda *asked, answer=answer: answer)
        try:
            scores = server.run(IDS, KEEP, layers=False)
        except InputError:
            refused += 1
            continue
        for other in (scores, full):
            compare("p", IDS, KEEP, scores, other).json()
            compare("p", IDS, KEEP, other, scores).json()
        compared += 1
    assert min(compared, refused) > 100


def _spoil(value: Any, chance: random.Random, strange: list[Any]) -> None:
    """Put something else at a random place of ``value``."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = chance.choice(keys)
        if not isinstance(value[key], dict | list) or chance.random() < 0.1:
            value[key] = copy.deepcopy(chance.choice(strange))
            return
        value = value[key]


def test_a_token_that_the_other_side_does_not_know() -> None:
    """Rows of one vocabulary beyond the other belong to no token, as where both give all."""
    scores = np.random.default_rng(2).normal(size=(4, 9)).astype(np.float32)
    logprobs = log_softmax(scores.astype(np.float64), -1)
    ids = np.array([[50, 3], [4, 50], [50, 60], [1, 2]])
    told = np.array([[-0.1, -3.0], [-0.2, -4.0], [-0.3, -5.0], [-0.4, -6.0]])
    known = TopK(ids, told, np.full(4, -1.0))
    for pair in ((Logits(scores), known), (known, Logits(scores))):
        found = compare("p", [2, 11, 5, 10], KEEP, *pair)
        expected = [
            abs(logprobs[0, 3] + 3.0),
            abs(logprobs[1, 4] + 0.2),
            np.inf,
            max(abs(logprobs[3, 1] + 0.4), abs(logprobs[3, 2] + 6.0)),
        ]
        np.testing.assert_allclose(found.max_abs, expected, rtol=1e-12)
        assert not found.same_top1[[0, 2]].any()
    assert found.rank[0] == found.rank[2] == 10  # the server was A: 9 tokens are known to B


def no_answer(body: dict[str, Any]) -> tuple[int, Any]:
    raise AssertionError("nothing is to be asked here")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_follows_no_redirect_to_another_server(status: int, serve: Serve) -> None:
    stolen: list[str | None] = []
    elsewhere = serve(no_answer, keys=stolen)
    headers = {"Location": f"{elsewhere}/v1/models"}
    address = serve(no_answer, {}, status=status, headers=headers)
    with pytest.raises(InputError) as caught:
        connect(address, "secret", "float32")
    assert f"{address}/v1/models: it redirects to {elsewhere}/v1/models, which is not followed" in (
        str(caught.value)
    )
    assert stolen == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_prompts_follow_no_redirect_either(status: int, serve: Serve) -> None:
    headers = {"Location": f"{serve(no_answer)}/v1/completions"}
    address = serve(lambda body: (status, {}), headers=headers)
    with pytest.raises(InputError, match=rf"completions: .*({status}|redirects)"):
        call(f"{address}/v1/completions", {"prompt": IDS}, "secret")


def test_a_redirect_on_the_same_server_is_followed(serve: Serve) -> None:
    keys: list[str | None] = []
    address = serve(no_answer, keys=keys)
    inside = serve(no_answer, status=307, headers={"Location": "/elsewhere/models"}, keys=keys)
    assert call(f"{address}/v1/models", None, "secret") == MODELS
    with pytest.raises(InputError, match="307"):  # in a circle, all of it on that server
        call(f"{inside}/v1/models", None, "secret")
    assert set(keys) == {"Bearer secret"}
    assert len(keys) > 2


@pytest.mark.parametrize(
    ("url", "other", "same"),
    [
        ("http://a/v1", "http://a:80/v2", True),
        ("https://A:443", "https://a/x", True),
        ("http://a", "https://a", False),
        ("http://a:8000", "http://a:8001", False),
        ("http://a", "http://a.b", False),
        ("http://a@b", "http://a", False),
    ],
)
def test_what_one_server_is(url: str, other: str, same: bool) -> None:
    assert same_server(url, other) == same_server(other, url) == same


def test_a_key_that_cannot_be_sent_is_not_told(serve: Serve) -> None:
    address = serve(no_answer)
    for key in ("sec\nret", "s\u00e9cret"):
        with pytest.raises(InputError, match="API key holds characters") as caught:
            connect(address, key, "float32")
        assert key not in str(caught.value)
    assert "secret" not in repr(connect(address, "secret", "float32"))


def test_each_server_gets_its_own_key_and_no_report_tells_it(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, list[str | None]] = {"a": [], "b": []}
    address = {side: serve(always(right()), keys=keys) for side, keys in seen.items()}
    (tmp_path / "p.json").write_text(json.dumps([{"name": "x", "ids": IDS}]))
    check = ["validate", "logits", address["a"], address["b"], "--prompts", tmp_path / "p.json"]
    check += ["--report", tmp_path / "r.html"]
    assert run_cli(*check, "--api-key", "hidden-a", "--api-key-b=hidden-b") == 0
    assert {side: set(keys) for side, keys in seen.items()} == {
        "a": {"Bearer hidden-a"},
        "b": {"Bearer hidden-b"},
    }
    assert "hidden" not in (tmp_path / "r.html").read_text() + "".join(capsys.readouterr())
    seen["b"].clear()
    assert run_cli(*check, "--api-key", "hidden-a", "--quiet") == 0
    assert set(seen["b"]) == {None}
    same = ["validate", "logits", address["b"], address["b"] + "/v1", *check[4:]]
    assert run_cli(*same, "--api-key", "hidden-b", "--quiet") == 0
    assert set(seen["b"]) == {None, "Bearer hidden-b"}
