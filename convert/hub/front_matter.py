"""The YAML between two ``---`` lines at the top of a README.md: what the Hub reads of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import DIGITS_LIMIT

_BLOCK = re.compile(r"\A(?:\ufeff)?---[ \t]*\r?\n(?P<yaml>.*?)^---[ \t]*(?:\r?\n|\Z)", re.S | re.M)

_NUMBER = re.compile(r"[-+]?[0-9.][0-9a-fA-Fx_.:+-]*")
_LENGTH_LIMIT = 1_000_000
"""Longest metadata read, in characters: PyYAML takes seconds for that much."""

# What PyYAML raises of dates, numbers and tags whose text is none, beside its own errors.
_PARSER_ERRORS = (ValueError, LookupError, AttributeError, RecursionError)


def read_front_matter(text: str, what: str) -> dict[str, Any]:
    """The metadata of a README; empty if it has none.

    Args:
        text: The README.
        what: What it is, for messages.

    Raises:
        InputError: No YAML, no mapping, or more than a model card needs: aliases, with which a few
            lines stand for any number of values, numbers that take hours, or a very long text.
    """
    import yaml

    found = _BLOCK.match(text)
    if found is None:
        return {}
    if len(found["yaml"]) > _LENGTH_LIMIT:
        size = f"{len(found['yaml'])} characters, more than {_LENGTH_LIMIT}"
        raise InputError(f"{what}: its metadata has {size}", "shorten it")
    try:
        value = yaml.load(found["yaml"], _loader(what))
    except (yaml.YAMLError, *_PARSER_ERRORS) as error:
        gist = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{what}: its metadata is not valid YAML: {gist}", "mend it") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{what}: its metadata is no mapping of names to values", "mend it")
    return {str(key): item for key, item in value.items()}


def _loader(what: str) -> Any:
    """PyYAML's safe loader, without aliases and numbers that no float holds."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                raise InputError(
                    f"{what}: its metadata uses the alias *{event.anchor}",
                    "write its value instead",
                )
            if isinstance(event, yaml.ScalarEvent) and _is_long_number(event.value):
                raise ValueError(f"a number of {len(event.value)} digits")
            return super().compose_node(parent, index)

    return Loader


def _is_long_number(text: str) -> bool:
    return len(text) > DIGITS_LIMIT and _NUMBER.fullmatch(text) is not None


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
