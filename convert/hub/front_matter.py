"""The YAML between two ``---`` lines at the top of a README.md: what the Hub reads of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gemma_convert.convert.errors import InputError

_BLOCK = re.compile(r"\A(?:\ufeff)?---[ \t]*\r?\n(?P<yaml>.*?)^---[ \t]*(?:\r?\n|\Z)", re.S | re.M)

# What PyYAML raises of dates, numbers and tags whose text is none, beside its own errors.
_PARSER_ERRORS = (ValueError, LookupError, AttributeError, RecursionError)


def read_front_matter(text: str, what: str) -> dict[str, Any]:
    """The metadata of a README; empty if it has none.

    Args:
        text: The README.
        what: What it is, for messages.

    Raises:
        InputError: No YAML, or no mapping.
    """
    import yaml

    found = _BLOCK.match(text)
    if found is None:
        return {}
    try:
        value = yaml.safe_load(found["yaml"])
    except (yaml.YAMLError, *_PARSER_ERRORS) as error:
        gist = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{what}: its metadata is not valid YAML: {gist}", "mend it") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{what}: its metadata is no mapping of names to values", "mend it")
    return {str(key): item for key, item in value.items()}


def with_front_matter(text: str, metadata: Mapping[str, Any], what: str) -> str:
    """``text`` with what it does not say yet of ``metadata`` added; all it says stays as it is.

    Raises:
        InputError: See `read_front_matter`.
    """
    missing = {k: v for k, v in metadata.items() if k not in read_front_matter(text, what)}
    if not missing:
        return text
    found = _BLOCK.match(text)
    if found is None:
        return f"---\n{dump(missing)}---\n\n{text}" if text else f"---\n{dump(missing)}---\n"
    end = found.end("yaml")
    newline = "" if not found["yaml"] or found["yaml"].endswith("\n") else "\n"
    return f"{text[:end]}{newline}{dump(missing)}{text[end:]}"


def dump(metadata: Mapping[str, Any]) -> str:
    """``metadata`` as YAML lines."""
    import yaml

    text: str = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)
    return text
