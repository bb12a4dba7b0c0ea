"""JSON from files that are not trusted: one object, no key twice, errors that name the file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.regular_file import open_regular

LFS_POINTER = b"version https://git-lfs"
"""How the small text file begins that git leaves in the place of a large one."""

JSON_LIMIT = 100_000_000
"""Longest JSON file read, in bytes: the limit that safetensors puts on its header."""

DEPTH_LIMIT = 100
"""Most objects and lists inside each other. What is read here needs 6; without a limit, whatever
walks the value would have to bear thousands."""

VALUES_LIMIT = 1_000_000
"""Most values in one file: a header tells of a tensor with 8 or 9, so this is for 100,000 tensors,
and the largest Gemma has some 1,200. Two bytes of text can become a list of 60, or an object."""

_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")

DIGITS_LIMIT = 300
"""Most digits of a whole number: all that a float can hold, so that any can be computed with."""

DOWNLOAD_AGAIN = "download it again"
NO_SUCH_FILE = "this is not such a file"


def parse_object(data: bytes, what: str, *, values: int | None = VALUES_LIMIT) -> dict[str, Any]:
    """Parse ``data`` as one JSON object.

    Args:
        data: UTF-8 text.
        what: What it is, for messages, such as ``header of /x/model.safetensors``.
        values: See `refuse_many_values`; None for any number.

    Raises:
        InputError: Not UTF-8, not JSON, not an object, too many values, nested too deep, a key
            given twice, or a string that is no Unicode text.
    """
    refuse_lfs_pointer(data, what)
    if values is not None:
        refuse_many_values(data, what, values)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_key_twice, parse_int=_int)
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8: {error.reason}", DOWNLOAD_AGAIN) from error
    except _KeyTwiceError as error:
        raise InputError(f"{what} holds the key {error.args[0]!r} twice", DOWNLOAD_AGAIN) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is not valid JSON: {error}", DOWNLOAD_AGAIN) from error
    if not isinstance(value, dict):
        raise InputError(
            f"{what} must be a JSON object, found {type(value).__name__}", DOWNLOAD_AGAIN
        )
    if _is_deep(value):
        raise InputError(f"{what} is nested more than {DEPTH_LIMIT} deep", DOWNLOAD_AGAIN)
    if _HALF_CHARACTER.search(data) and not _is_unicode(value):
        raise InputError(f"{what} holds half a surrogate pair, no character", DOWNLOAD_AGAIN)
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        InputError: Unreadable, longer than `JSON_LIMIT`, or not one JSON object.
    """
    data = read_bytes(path)
    return parse_object(data, str(path))


def read_bytes(path: Path) -> bytes:
    """Read a small file.

    Raises:
        InputError: Unreadable, no regular file, or longer than `JSON_LIMIT`.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            # Files of /proc say 0 and go on.
            if size > JSON_LIMIT or len(data := file.read(JSON_LIMIT + 1)) > JSON_LIMIT:
                raise InputError(f"{path} has {size} bytes, more than {JSON_LIMIT}", NO_SUCH_FILE)
            return data
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}", "check the path and its permissions"
        ) from error


def refuse_many_values(data: bytes, what: str, limit: int = VALUES_LIMIT) -> None:
    """Raise InputError if JSON may hold more than ``limit`` values; nothing is built for that.

    Each value but the first stands behind a bracket or a comma. Those in strings count too.
    """
    found = sum(map(data.count, (b"{", b"[", b",")))
    if found > limit:
        raise InputError(f"{what} has {found} brackets and commas, more than {limit}", NO_SUCH_FILE)


def refuse_lfs_pointer(start: bytes, what: str) -> None:
    """Raise InputError if a file that begins with ``start`` is a Git LFS pointer."""
    if start.startswith(LFS_POINTER):
        raise InputError(
            f"{what} is a Git LFS pointer, not the file itself",
            "run `git lfs pull` in its repository",
        )


def _int(digits: str) -> int:
    if len(digits) > DIGITS_LIMIT:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _is_deep(value: Any) -> bool:
    """Whether lists and objects nest beyond `DEPTH_LIMIT`, found level by level."""
    level = [value]
    for _ in range(DEPTH_LIMIT):
        level = [
            inner
            for holder in level
            for inner in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _is_unicode(value: Any) -> bool:
    """Whether all strings in ``value`` can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


class _KeyTwiceError(ValueError):
    """A key that stands twice in one object."""


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _KeyTwiceError(key)
            seen.add(key)
    return result
