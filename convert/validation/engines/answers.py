"""What the answers of OpenAI's API hold, checked: whatever a server sends, one line tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isnan
from typing import Any

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.printable import one_line

Told = dict[int, float]
"""Natural logarithms of the probabilities of some tokens, by their ids."""

_SHOWN = 80
_LARGEST_ID = 2**31
_ABOVE_ONE = 1e-2
"""A probability may be this much above one, by rounding."""


def served_model(answer: Mapping[str, Any], where: str) -> tuple[str, int | None]:
    """Name and longest prompt, generated tokens included, of the first model of ``/models``.

    Args:
        answer: What came back.
        where: The address, for messages.

    Raises:
        InputError: If there is none.
    """
    models = _list(answer.get("data"), f"{where}: data", or_none=True)
    if not models:
        raise InputError(f"{where}: it serves no model", "start it with one")
    model = _object(models[0], f"{where}: data[0]")
    name, limit = model.get("id"), model.get("max_model_len")
    _expect(isinstance(name, str) and name != "", f"{where}: data[0].id", "a model's name", name)
    fits = limit is None or (_is_whole(limit) and limit > 0)
    _expect(fits, f"{where}: data[0].max_model_len", "a number of tokens", limit)
    return str(name), limit


def of_prompt(answer: Mapping[str, Any], where: str) -> list[Told] | None:
    """The ``prompt_logprobs`` of vLLM, and those of the token behind the prompt.

    Args:
        answer: What came back.
        where: The address, for messages.

    Returns:
        One for each token from the second on and one for the token behind the last, empty where
        the server tells nothing; None if it knows nothing of ``prompt_logprobs``.

    Raises:
        InputError: If they are no log probabilities.
    """
    choice = _choice(answer, where)
    listed = _list(choice.get("prompt_logprobs"), f"{where}: prompt_logprobs", or_none=True)
    if not listed:
        return None
    found = []
    for i, entry in enumerate(listed[1:], 1):
        at = f"{where}: prompt_logprobs[{i}]"
        tokens = {} if entry is None else _object(entry, at)
        logprobs = {t: _object(one, f"{at}.{t}").get("logprob") for t, one in tokens.items()}
        found.append(dict(_told(logprobs, at, prefix="")))
    return [*found, *(_listed(choice, where)[:1] or [{}])]


def of_echo(answer: Mapping[str, Any], where: str) -> list[Told]:
    """As `of_prompt`, of a prompt that came back with its log probabilities (``echo``)."""
    return _listed(_choice(answer, where), where)[1:]


def _choice(answer: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    choices = _list(answer.get("choices"), f"{where}: choices")
    _expect(bool(choices), f"{where}: choices", "one", choices)
    return _object(choices[0], f"{where}: choices[0]")


def _listed(choice: Mapping[str, Any], where: str) -> list[Told]:
    """``{"logprobs": {"top_logprobs": [{"token_id:818": -1.2, ...}, ...]}}``."""
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return []
    inner = _object(logprobs, f"{where}: logprobs").get("top_logprobs")
    found = []
    for i, entry in enumerate(_list(inner, f"{where}: top_logprobs", or_none=True)):
        at = f"{where}: top_logprobs[{i}]"
        tokens = {} if entry is None else _object(entry, at)
        found.append(dict(_told(tokens, at, prefix="token_id:")))
    return found


def _told(logprobs: Mapping[str, Any], at: str, prefix: str) -> Iterator[tuple[int, float]]:
    for token, value in logprobs.items():
        number = token.removeprefix(prefix)
        if prefix and number == token:
            raise InputError(
                f"{at}: tokens come back as text ({one_line(repr(token), _SHOWN)}), which cannot "
                "be told apart",
                "the server must support return_tokens_as_token_ids",
            )
        is_id = number.isascii() and number.isdecimal() and len(number) <= len(str(_LARGEST_ID))
        _expect(is_id and int(number) < _LARGEST_ID, at, "a token id", token)
        what = f"{at}.{token}"
        _expect(isinstance(value, int | float) and not isinstance(value, bool), what, _LOG, value)
        # NaN is what the model says, and judged; see `Comparison.finite_a`
        _expect(isnan(value) or value <= _ABOVE_ONE, what, _LOG, value)
        yield int(number), float(value)


_LOG = "a log probability, 0 or less"


def _object(value: Any, at: str) -> Mapping[str, Any]:
    _expect(isinstance(value, Mapping), at, "an object", value)
    return value  # type: ignore[no-any-return]


def _list(value: Any, at: str, *, or_none: bool = False) -> list[Any]:
    if value is None and or_none:
        return []
    _expect(isinstance(value, list), at, "a list", value)
    return value  # type: ignore[no-any-return]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _expect(fits: bool, at: str, expected: str, found: Any) -> None:
    if not fits:
        shown = one_line(json.dumps(found), _SHOWN)
        raise InputError(f"{at}: expected {expected}, found {shown}", "is it OpenAI's API?")
