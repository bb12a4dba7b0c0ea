"""Copies of JSON files that say nothing of this machine's directories.

A ledger records the paths that were read and the command as typed; configs of older transformers
and of PEFT record where a model was loaded from. What is pushed holds names alone: of a path its
last part, of a model on the Hub its id.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from gemma_convert.convert.hub.names import SCHEME, plain_hub_path

PATH_KEYS = frozenset({"path", "source"})
"""Keys of a ledger whose values are paths."""

MODEL_KEYS = frozenset({"_name_or_path", "name_or_path", "base_model_name_or_path"})
"""Keys of Hugging Face configs whose values are a Hub id or a path."""

# A path from the root or the home directory, or in a bucket; not the slash of "a / b", nor the
# rest of a longer word.
_PATH = re.compile(
    r"(?<![\w.:/@)-])(?:~|(?:file|gs|s3):/)?/[^\s'\":;,()]+|\b(?:gs|s3)://[^\s'\",]+"
)


def public_ledger(ledger: Mapping[str, Any]) -> dict[str, Any]:
    """A ledger fit to be published: every path is its last part, or a Hub id.

    Args:
        ledger: As `ledger.make_ledger` makes it; entries unknown here are cleaned like the others.
    """
    known = {text: public_path(text) for text in _paths(ledger)}
    cleaned: dict[str, Any] = _cleaned(dict(ledger), known)
    if isinstance(command := ledger.get("command"), str):
        cleaned["command"] = _command(command, known)
    return cleaned


def public_path(text: str) -> str:
    """The last part of a path; a path on the Hub stays whole."""
    if text.startswith(SCHEME):
        return text
    if plain_hub_path(text) is not None and not Path(text).exists():
        return text
    return PurePosixPath(text.rstrip("/") or "/").name


def public_config(text: bytes, model: str | None) -> bytes:
    """A config whose `MODEL_KEYS` hold no path of this machine.

    Args:
        text: A JSON file; given back as it is if nothing in it is such a path.
        model: Hub id of the base model, to stand in the place of its path.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(config, dict):
        return text
    paths = {k: v for k, v in config.items() if k in MODEL_KEYS and _is_local(v)}
    if not paths:
        return text
    replaced = {key: model or public_path(value) for key, value in paths.items()}
    return (json.dumps(config | replaced, indent=2, ensure_ascii=False) + "\n").encode()


def _is_local(value: Any) -> bool:
    """Whether a model's name is a path; what could be a Hub id is one unless it exists here."""
    if not isinstance(value, str) or not value or value.startswith(SCHEME):
        return False
    rooted = value[0] in "/.~" or "\\" in value or value.count("/") > 1
    return rooted or ("/" in value and Path(value).exists())


def _paths(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, str) and key in PATH_KEYS:
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _paths(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, key)


def _cleaned(value: Any, known: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _clean_text(value, known)
    if isinstance(value, Mapping):
        return {_clean_text(k, known): _cleaned(v, known) for k, v in value.items()}
    return [_cleaned(item, known) for item in value] if isinstance(value, list) else value


def _clean_text(text: str, known: Mapping[str, str]) -> str:
    if text in known:
        return known[text]
    for path in sorted(known, key=len, reverse=True):
        if "/" in path and not path.startswith(SCHEME):
            text = text.replace(path, known[path])
    return _PATH.sub(lambda found: public_path(found[0]), text)


def _command(command: str, known: Mapping[str, str]) -> str:
    """A command whose words are no paths."""
    words = []
    try:
        typed = shlex.split(command)
    except ValueError:  # a quotation mark that none of ours left open
        typed = command.split()
    for word in typed:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        words.append(option + equals + (known.get(value) or public_path(value) if value else value))
    return shlex.join(words)
