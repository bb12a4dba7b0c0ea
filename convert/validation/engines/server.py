"""A server with OpenAI's API as an engine, such as vLLM: top-k log probabilities of the prompt."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.validation.engines.base import About, TopK

TOP_K = 20
"""The most log probabilities that vLLM gives unless it is started with --max-logprobs."""

_SECONDS = 600
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        about: What a report says of it; its name is the address up to and including ``/v1``.
        model: The served model's name.
        api_key: Sent as a bearer token, if any.
    """

    about: About
    model: str
    api_key: str | None = None

    def require_runnable(self) -> None:
        """It answered already."""

    def load(self) -> Server:
        """It runs already."""
        return self

    def run(self, ids: list[int], keep: list[int], *, layers: bool) -> TopK:
        """See `Engine.run`; a server has no hidden states to give.

        Raises:
            InputError: If the server gives no log probabilities of prompt tokens.
        """
        asked = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        wanted = {"prompt_logprobs": TOP_K, "logprobs": TOP_K, "return_tokens_as_token_ids": True}
        answer = call(f"{self.about.name}/completions", {**asked, **wanted}, self.api_key)
        choice = answer["choices"][0]
        if choice.get("prompt_logprobs"):
            told = [_of_prompt(entry) for entry in choice["prompt_logprobs"][1:]]
            last = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
        else:
            asked |= {"echo": True, "logprobs": 5, "return_tokens_as_token_ids": True}
            answer = call(f"{self.about.name}/completions", asked, self.api_key)
            listed = (answer["choices"][0].get("logprobs") or {}).get("top_logprobs") or []
            told = [_of_echo(self.about.name, entry) for entry in listed[1 : len(ids)]]
            last = listed[len(ids) : len(ids) + 1] or [{}]
        if len(told) != len(ids) - 1:
            raise InputError(
                f"{self.about.name}: log probabilities of {len(told)} of {len(ids) - 1} prompt "
                "tokens came back",
                "the server must support prompt_logprobs (vLLM) or echo with logprobs",
            )
        told.append(_of_echo(self.about.name, last[0]))
        return _top_k([told[i] for i in keep], [(*ids, None)[i + 1] for i in keep])


def connect(address: str, api_key: str | None, dtype: str) -> Server:
    """Ask a server which model it serves and how long its prompts may be.

    Raises:
        InputError: If nothing answers there, or not as OpenAI's API does.
    """
    address = address.rstrip("/")
    if urlsplit(address).path in ("", "/"):
        address += "/v1"
    answer = call(f"{address}/models", None, api_key)
    models = answer.get("data") or []
    if not models:
        raise InputError(f"{address}: it serves no model", "start it with one")
    limit = models[0].get("max_model_len")
    about = About(
        address,
        "server",
        dtype=dtype,
        stored=dtype,
        # one token is generated behind the prompt
        limit=limit - 1 if isinstance(limit, int) else None,
    )
    return Server(about, models[0]["id"], api_key)


def call(url: str, body: Mapping[str, Any] | None, api_key: str | None) -> dict[str, Any]:
    """POST ``body`` as JSON, or GET if None.

    Raises:
        InputError: If nothing answers, or not with JSON.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    # what runs on this machine is not behind the proxy that the environment names
    local = urlsplit(url).hostname in _LOOPBACK
    handlers = [urllib.request.ProxyHandler({})] if local else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=_SECONDS) as response:
            found = json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read(500).decode(errors="replace")
        raise InputError(f"{url}: {error.code} {error.reason}: {text}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{url}: {error}", "is the server running there?") from error
    if not isinstance(found, dict):
        raise InputError(f"{url}: the answer is no JSON object", "is it OpenAI's API?")
    return found


def _of_prompt(entry: Mapping[str, Any] | None) -> dict[int, float]:
    """As vLLM has it: ``{"818": {"logprob": -1.2, ...}, ...}``."""
    return {int(token): float(told["logprob"]) for token, told in (entry or {}).items()}


def _of_echo(name: str, entry: Mapping[str, float] | None) -> dict[int, float]:
    """``{"token_id:818": -1.2, ...}``."""
    found = {}
    for token, value in (entry or {}).items():
        prefix, _, number = token.rpartition("token_id:")
        if prefix or not number.isdigit():
            raise InputError(
                f"{name}: tokens come back as text ({token!r}), which cannot be told apart",
                "the server must support return_tokens_as_token_ids",
            )
        found[int(number)] = float(value)
    return found


def _top_k(told: list[dict[int, float]], following: list[int | None]) -> TopK:
    k = max((len(entry) for entry in told), default=0)
    ids = np.full((len(told), k), -1)
    logprobs = np.full((len(told), k), -np.inf)
    after = np.full(len(told), np.nan)
    for i, (entry, token) in enumerate(zip(told, following, strict=True)):
        best = sorted(entry.items(), key=lambda item: -item[1])
        ids[i, : len(best)] = [token for token, _ in best]
        logprobs[i, : len(best)] = [value for _, value in best]
        after[i] = np.nan if token is None else entry.get(token, np.nan)
    return TopK(ids, logprobs, after)
