"""A server with OpenAI's API as an engine, such as vLLM: top-k log probabilities of the prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.validation.engines.answers import Told, of_echo, of_prompt, served_model
from gemma_convert.convert.validation.engines.base import About, TopK
from gemma_convert.convert.validation.engines.http import call

TOP_K = 20
"""The most log probabilities that vLLM gives unless it is started with --max-logprobs."""


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
    api_key: str | None = field(default=None, repr=False)

    def require_runnable(self) -> None:
        """It answered already."""

    def load(self) -> Server:
        """It runs already."""
        return self

    def run(self, ids: list[int], keep: list[int], *, layers: bool) -> TopK:
        """See `Engine.run`; a server has no hidden states to give.

        Raises:
            InputError: If the server gives no log probabilities of all these positions.
        """
        where = f"{self.about.name}/completions"
        asked = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        asked |= {"return_tokens_as_token_ids": True}
        wanted = {"prompt_logprobs": TOP_K, "logprobs": TOP_K}
        told = of_prompt(call(where, {**asked, **wanted}, self.api_key), where)
        if told is None:
            told = of_echo(call(where, {**asked, "echo": True, "logprobs": 5}, self.api_key), where)
        if len(told) != len(ids) or not all(told[i] for i in keep):
            known = sum(map(bool, told))
            raise InputError(
                f"{where}: log probabilities came back behind {known} of {len(ids)} tokens",
                "the server must support prompt_logprobs (vLLM) or echo with logprobs",
            )
        return _top_k([told[i] for i in keep], [(*ids, None)[i + 1] for i in keep])


def connect(address: str, api_key: str | None, dtype: str) -> Server:
    """Ask a server which model it serves and how long its prompts may be.

    Raises:
        InputError: If nothing answers there, or not as OpenAI's API does.
    """
    try:
        parts = urlsplit(address)
        plain = parts.hostname and not (parts.query or parts.fragment or parts.username)
    except ValueError:
        plain = False
    if not plain:
        raise InputError(
            f"{address}: expected scheme, host, port and path alone",
            "give an address such as http://127.0.0.1:8000/v1, and a key as --api-key",
        )
    address = address.rstrip("/")
    if not parts.path.strip("/"):
        address += "/v1"
    model, limit = served_model(call(f"{address}/models", None, api_key), address)
    # one token is generated behind the prompt
    limit = limit - 1 if limit is not None else None
    about = About(address, "server", dtype=dtype, stored=dtype, limit=limit)
    return Server(about, model, api_key)


def _top_k(told: list[Told], following: list[int | None]) -> TopK:
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
