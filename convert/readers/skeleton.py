"""A local directory that stands for a remote one: small files whole, shards as headers alone.

A shard becomes a sparse file of its true size that holds the header and nothing else, so that the
readers of local directories, and all their checks, serve remote ones too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gemma_convert.convert.errors import GemmaConvertError, InputError
from gemma_convert.convert.readers.jsonfile import DOWNLOAD_AGAIN, JSON_LIMIT
from gemma_convert.convert.readers.orbax_metadata import OCDBT_MANIFEST
from gemma_convert.convert.readers.orbax_steps import COMMIT_FILE, STEP_FILE, TREE_FILE
from gemma_convert.convert.readers.provenance import LEDGER_NAME
from gemma_convert.convert.readers.safetensors_header import HEADER_LIMIT
from gemma_convert.convert.readers.side_files import FOLDERS, REWRITTEN, travels

_FIRST_BYTES = 256 << 10
"""What is fetched of a shard at first: the headers of most are shorter."""

INDEX_SUFFIX = ".safetensors.index.json"

_BESIDE = frozenset({"adapter_config.json", LEDGER_NAME})
"""MaxText's config of an adapter, and our ledger."""

_ORBAX_HEADS = frozenset({TREE_FILE, STEP_FILE, COMMIT_FILE, OCDBT_MANIFEST})

Fetch = Callable[[str, int, int], bytes]
"""``fetch(name, start, stop)``: those bytes of a file."""


@dataclass(frozen=True)
class RemoteEntry:
    """A file of a remote directory.

    Attributes:
        size: Bytes.
        mtime_ns: When it was last changed, so that a fingerprint tells a change; 0 if unknown.
    """

    size: int
    mtime_ns: int = 0


def is_shard(name: str) -> bool:
    """Whether a file at the top of a directory holds safetensors."""
    return "/" not in name and name.endswith(".safetensors")


def is_small(name: str) -> bool:
    """Whether a file beside the weights is needed: config, index, tokenizer, templates."""
    folder, _, rest = name.partition("/")
    if rest:
        return folder in FOLDERS and "/" not in rest and rest[0] != "."
    return name in REWRITTEN or name.endswith(INDEX_SUFFIX) or travels(name)


def is_orbax_head(name: str) -> bool:
    """Whether a file tells what an Orbax checkpoint holds: its steps, items and trees."""
    return name.rpartition("/")[2] in _ORBAX_HEADS


def is_beside_arrays(name: str) -> bool:
    """Whether a file of an Orbax checkpoint is read beside its arrays."""
    return is_orbax_head(name) or name.rpartition("/")[2] in _BESIDE


def make_skeleton(
    directory: Path,
    where: str,
    entries: Iterable[tuple[str, RemoteEntry]],
    fetch: Fetch,
) -> None:
    """Fill an empty ``directory`` with the small files and the shards' headers.

    Args:
        directory: A fresh local directory.
        where: What it stands for, for messages.
        entries: The remote files; those that are neither small nor shards are passed over.
        fetch: Gets bytes of a file.

    Raises:
        InputError: A small file that is none, or a shard whose header cannot be one.
    """
    for name, entry in entries:
        path = directory / name
        if is_shard(name):
            _write_head(path, f"{where}/{name}", entry, partial(fetch, name))
        elif is_small(name):
            if entry.size > JSON_LIMIT:
                raise InputError(
                    f"{where}/{name} has {entry.size} bytes, more than {JSON_LIMIT}",
                    "this is not such a file",
                )
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(fetch(name, 0, entry.size) if entry.size else b"")
        else:
            continue
        if entry.mtime_ns:
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


@contextmanager
def told_as(where: str, mirror: str | Path) -> Iterator[None]:
    """Let errors name what ``mirror`` stands for instead of it."""
    try:
        yield
    except GemmaConvertError as error:
        texts = [text.replace(str(mirror), where) for text in (error.what, error.remedy)]
        raise type(error)(*texts) from error


def _write_head(
    path: Path, what: str, entry: RemoteEntry, fetch: Callable[[int, int], bytes]
) -> None:
    data = fetch(0, min(entry.size, _FIRST_BYTES)) if entry.size else b""
    length = 8 + int.from_bytes(data[:8], "little")
    if len(data) < min(length, entry.size) and length <= HEADER_LIMIT + 8:
        data += fetch(len(data), min(length, entry.size))
    if len(data) < min(length, entry.size, _FIRST_BYTES):
        raise InputError(f"{what} ended after {len(data)} bytes", DOWNLOAD_AGAIN)
    with path.open("wb") as file:
        file.write(data)
        file.truncate(entry.size)
