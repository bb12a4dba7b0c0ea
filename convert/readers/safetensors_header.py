"""The header of a safetensors file, which is not trusted until every claim in it is checked.

The format (https://github.com/huggingface/safetensors#format): 8 bytes, the header's length N as a
little-endian unsigned integer; N bytes of JSON, ``{name: {dtype, shape, data_offsets}}`` with an
optional ``__metadata__`` of strings; then the tensors' bytes, row-major and little-endian, without
holes, overlaps or a rest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gemma_convert.convert import dtypes
from gemma_convert.convert.digests import stamp
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import DOWNLOAD_AGAIN, parse_object, refuse_lfs_pointer
from gemma_convert.convert.readers.names import in_natural_order
from gemma_convert.convert.readers.regular_file import open_regular

HEADER_LIMIT = 100_000_000
"""Longest header that the safetensors library reads, in bytes."""

_LENGTH_BYTES = 8
_RANK_LIMIT = 32
_BYTES_LIMIT = 2**63
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """One tensor as the header describes it.

    Attributes:
        shape: Its shape.
        dtype: Its numpy dtype.
        begin: Its first byte, counted from the start of the file.
        end: One past its last byte.
    """

    shape: tuple[int, ...]
    dtype: dtypes.DType
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header.

    Attributes:
        entries: Name to entry, in natural order of the names.
        metadata: The strings under ``__metadata__``.
        size: Bytes of the whole file.
        mtime_ns: When the file was last changed.
        stamp: The same and more, for the fingerprint.
        digest: sha256 of the length field and the header, in hexadecimal.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    size: int
    mtime_ns: int
    stamp: str
    digest: str

    @property
    def fingerprint(self) -> str:
        """Identifies the file cheaply: the digest of its header, its size and its stamp.

        Not a digest of the weights; whoever rewrites them changes the stamp.
        """
        return f"sha256:{self.digest} size:{self.size} {self.stamp}"


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        InputError: Anything that the format does not allow, a file cut short, a Git LFS pointer.
    """
    try:
        with open_regular(path) as file:
            stat = os.fstat(file.fileno())
            start = file.read(_LENGTH_BYTES)
            # A pointer is told by its text: as a length, that text would be an absurd number.
            refuse_lfs_pointer(start + file.read(32), f"{path}")
            length = _header_length(start, stat.st_size, path)
            file.seek(_LENGTH_BYTES)
            text = file.read(length)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}", "check the path and its permissions"
        ) from error
    if len(text) < length:
        raise _cut_short(path, _LENGTH_BYTES + length, _LENGTH_BYTES + len(text))
    table = parse_object(text, f"header of {path}")
    metadata = _metadata(table.pop(_METADATA, {}), path)
    data_start = _LENGTH_BYTES + length
    entries = {name: _entry(name, value, data_start, path) for name, value in table.items()}
    _check_coverage(entries, data_start, stat.st_size, path)
    return Header(
        entries=in_natural_order(entries),
        metadata=metadata,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        stamp=stamp(stat),
        digest=hashlib.sha256(start + text).hexdigest(),
    )


def _header_length(start: bytes, size: int, path: Path) -> int:
    if len(start) < _LENGTH_BYTES:
        raise _cut_short(path, _LENGTH_BYTES, len(start))
    length = int.from_bytes(start, "little")
    if length > HEADER_LIMIT:
        raise InputError(
            f"{path} is not a safetensors file: its first 8 bytes give a header of {length} bytes, "
            f"the format allows {HEADER_LIMIT}",
            DOWNLOAD_AGAIN,
        )
    if _LENGTH_BYTES + length > size:
        raise _cut_short(path, _LENGTH_BYTES + length, size)
    return length


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise InputError(
            f"header of {path}: {_METADATA} must map strings to strings", DOWNLOAD_AGAIN
        )
    return value


def _entry(name: str, value: Any, data_start: int, path: Path) -> Entry:
    def bad(why: str) -> InputError:
        return InputError(f"header of {path}: tensor {name!r} {why}", DOWNLOAD_AGAIN)

    if not name or not name.isprintable():
        raise bad("has a name that is empty or holds control characters")
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise bad("needs dtype, shape and data_offsets")
    shape, offsets, dtype_name = value["shape"], value["data_offsets"], value["dtype"]
    if not isinstance(dtype_name, str):
        raise bad(f"has a dtype that is no string: {dtype_name!r}")
    if not _counts(shape):
        raise bad(f"has a shape that is no list of sizes: {shape!r}")
    if not _counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] < _BYTES_LIMIT:
        raise bad(f"has data_offsets that are not [begin, end]: {offsets!r}")
    try:
        dtype = dtypes.from_safetensors(dtype_name)
    except InputError as error:
        raise InputError(
            f"header of {path}: tensor {name!r}: {error.what}", error.remedy
        ) from error
    # Of an empty tensor too: numpy multiplies the other sizes.
    strides = prod(size for size in shape if size) * dtype.itemsize
    if len(shape) > _RANK_LIMIT or strides >= _BYTES_LIMIT:
        raise bad(f"has a shape beyond what can be addressed: {shape!r}")
    begin, end = offsets
    expected = prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise bad(
            f"of shape {shape} and dtype {dtype_name} needs {expected} bytes, "
            f"its data_offsets {offsets} give {end - begin}"
        )
    return Entry(tuple(shape), dtype, data_start + begin, data_start + end)


def _counts(value: Any) -> bool:
    """Whether ``value`` is a list of integers from 0 on (True is no integer here)."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_coverage(entries: Mapping[str, Entry], data_start: int, size: int, path: Path) -> None:
    """Raise InputError unless the tensors cover the bytes after the header, each byte once."""
    position, before = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            what = "overlaps" if entry.begin < position else "leaves a hole after"
            raise InputError(
                f"header of {path}: tensor {name!r} {what} {before}: it begins at byte "
                f"{entry.begin}, expected {position}",
                DOWNLOAD_AGAIN,
            )
        position, before = entry.end, repr(name)
    if position > size:
        raise _cut_short(path, position, size)
    if position < size:
        raise InputError(
            f"{path} has {size - position} bytes after its last tensor: expected {position} bytes, "
            f"found {size}",
            DOWNLOAD_AGAIN,
        )


def _cut_short(path: Path, expected: int, found: int) -> InputError:
    return InputError(
        f"{path} is cut short: expected at least {expected} bytes, found {found}", DOWNLOAD_AGAIN
    )
