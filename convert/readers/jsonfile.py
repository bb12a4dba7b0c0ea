"""JSON from files that are not trusted: one object, no key twice, errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemma_convert.convert.errors import InputError

LFS_POINTER = b"version https://git-lfs"
"""How the small text file begins that git leaves in the place of a large one."""

JSON_LIMIT = 100_000_000
"""Longest JSON file read, in bytes: the limit that safetensors puts on its header."""

DOWNLOAD_AGAIN = "download it again"


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse ``data`` as one JSON object.

    Args:
        data: UTF-8 text.
        what: What it is, for messages, such as ``header of /x/model.safetensors``.

    Raises:
        InputError: Not UTF-8, not JSON, not an object, nested too deep, or a key given twice.
    """
    refuse_lfs_pointer(data, what)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_key_twice)
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
        InputError: Unreadable or longer than `JSON_LIMIT`.
    """
    try:
        size = path.stat().st_size
        if size > JSON_LIMIT:
            raise InputError(
                f"{path} has {size} bytes, more than {JSON_LIMIT}", "this is not such a file"
            )
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}", "check the path and its permissions"
        ) from error


def refuse_lfs_pointer(start: bytes, what: str) -> None:
    """Raise InputError if a file that begins with ``start`` is a Git LFS pointer."""
    if start.startswith(LFS_POINTER):
        raise InputError(
            f"{what} is a Git LFS pointer, not the file itself",
            "run `git lfs pull` in its repository",
        )


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
