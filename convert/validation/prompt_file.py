"""Prompts of a file that a user wrote: whatever is wrong in it is told by its line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.printable import one_line
from gemma_convert.convert.readers.jsonfile import read_bytes
from gemma_convert.convert.validation.prompts import Prompt, chat, encode

_FORM = 'write {"name": "...", "text": "..."}, or "messages" or "ids" for "text"'
_MESSAGE = '{"role": "...", "content": "..."}'
_SHOWN = 60
_HALF = re.compile("[\ud800-\udfff]")


def from_file(path: Path, tokenizer: Any | None, bos: int) -> list[Prompt]:
    """Prompts of a JSON or JSON-lines file.

    Each is an object with a ``name`` and one of ``text``, ``messages`` (a chat, for the template)
    or ``ids`` (sent as they are).

    Args:
        path: The file.
        tokenizer: Of transformers; None if only ids can be used.
        bos: Its BOS.

    Raises:
        InputError: If the file is not of that form, or text is there but no tokenizer.
    """
    prompts = [_prompt(at, entry, tokenizer, bos) for at, entry in _entries(path)]
    if not prompts:
        raise InputError(f"{path}: expected prompts, found none", _FORM)
    return prompts


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries, each with the file and where it stands there."""
    try:
        text = read_bytes(path).decode("utf-8-sig")  # some editors begin a file with a BOM
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected UTF-8, found {error.reason}", _FORM) from error
    try:
        listed = _parsed(text)
    except ValueError:
        yield from _lines(path, text)
        return
    for i, entry in enumerate(listed if isinstance(listed, list) else [listed]):
        yield f"{path}: entry {i}" if isinstance(listed, list) else str(path), entry


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}: line {number}", _parsed(line)
            except ValueError as error:
                raise InputError(
                    f"{path}: line {number}: neither the file nor this line is JSON: {error}", _FORM
                ) from error


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _prompt(at: str, entry: Any, tokenizer: Any | None, bos: int) -> Prompt:
    _expect(isinstance(entry, Mapping), at, "an object", entry)
    given = [key for key in ("text", "messages", "ids") if key in entry]
    _expect(len(given) == 1, at, 'one of "text", "messages" and "ids"', given or list(entry))
    name = entry.get("name", at.rpartition(" ")[2])
    _expect(isinstance(name, str | int), f"{at}: name", "a string", name)
    _expect(_is_unicode(name), f"{at}: name", "Unicode, no half of a surrogate pair", name)
    key, value = given[0], entry[given[0]]
    what = f"{at}: {key}"
    if key == "ids":
        _expect(_is_list_of(value, _is_id), what, "a list of token ids, 0 or more", value)
        return Prompt(str(name), tuple(value))
    if tokenizer is None:
        raise InputError(
            f"{what} of {name!r}, and neither side has a tokenizer",
            "give a directory with one as --base, or prompts as ids",
        )
    if key == "text":
        _expect(isinstance(value, str) and value != "", what, "a string, not empty", value)
        _expect(_is_unicode(value), what, "Unicode, no half of a surrogate pair", value)
        return Prompt(str(name), encode(tokenizer, value, bos))
    _expect(_is_list_of(value, _is_message), what, f"a list of {_MESSAGE}", value)
    try:
        return Prompt(str(name), chat(tokenizer, value))
    except Exception as error:  # the template is a program of the model's makers
        raise InputError(
            f"{what}: the chat template refuses it: {type(error).__name__}: {error}", _FORM
        ) from error


def _expect(fits: bool, at: str, expected: str, found: Any) -> None:
    if not fits:
        raise InputError(f"{at}: expected {expected}, found {one_line(repr(found), _SHOWN)}", _FORM)


def _is_unicode(value: Any) -> bool:
    return _HALF.search(str(value)) is None


def _is_list_of(value: Any, fits: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(fits, value))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_message(value: Any) -> bool:
    """A role and its text, or the parts that some templates take."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list)
