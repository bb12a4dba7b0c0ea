"""A model of the Hub by its headers: they are fetched by ranges of bytes, weights when needed."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_convert.convert.awaited import Awaited, Shards
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.hub.names import HubPath
from gemma_convert.convert.hub.session import hub_errors
from gemma_convert.convert.readers.safetensors import open_safetensors
from gemma_convert.convert.readers.safetensors_tensor import SafetensorsTensor
from gemma_convert.convert.readers.side_files import side_files
from gemma_convert.convert.readers.skeleton import (
    Fetch,
    RemoteEntry,
    is_shard,
    make_skeleton,
    told_as,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def open_headers(
    api: HfApi, path: HubPath, sizes: Mapping[str, int], near: Path | None = None
) -> Checkpoint:
    """Open a model from its headers alone, fetched by ranges of bytes; no tensor can be read.

    Args:
        api: Of the Hub.
        path: The model.
        sizes: Of its files.
        near: Where the small files are, if they are fetched already.
    """
    ranges = _ranges(api, path)

    def fetch(name: str, start: int, stop: int) -> bytes:
        if near is None or is_shard(name):
            return ranges(name, start, stop)
        return (near / name).read_bytes()

    with tempfile.TemporaryDirectory(prefix="gemma-convert-") as name, told_as(str(path), name):
        entries = [(file, RemoteEntry(size)) for file, size in sizes.items()]
        make_skeleton(Path(name), str(path), entries, fetch)
        return at_commit(open_safetensors(Path(name)), path)


def open_awaited(
    api: HfApi,
    path: HubPath,
    sizes: Mapping[str, int],
    near: Path,
    names: Collection[str],
    shards: Shards,
) -> Checkpoint:
    """Open a model whose small files are ``near``; each of its shards is fetched when it is read.

    Args:
        api: Of the Hub.
        path: The model.
        sizes: Of its files.
        near: A local directory.
        names: The shards that count.
        shards: Fetches them.
    """
    wanted = {name: size for name, size in sizes.items() if name in names or not is_shard(name)}
    opened = open_headers(api, path, wanted, near)
    tensors = {
        name: Awaited(head, shards)
        for name, head in opened.items()
        if isinstance(head, SafetensorsTensor)
    }
    return opened.replace(tensors=tensors, files=side_files(near))


def at_commit(opened: Checkpoint, path: HubPath, notes: tuple[str, ...] = ()) -> Checkpoint:
    """``opened`` under its name on the Hub, whose commit says more than when a copy was made."""
    return opened.replace(
        source=str(path),
        notes=(*notes, *opened.notes),
        fingerprint={
            file: text.partition(" mtime_ns:")[0] for file, text in opened.fingerprint.items()
        },
    )


def _ranges(api: HfApi, path: HubPath) -> Fetch:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status, http_backoff

    def fetch(name: str, start: int, stop: int) -> bytes:
        url = hf_hub_url(
            path.repo,
            name,
            subfolder=path.folder or None,
            revision=path.revision,
            endpoint=api.endpoint,
        )
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
        with hub_errors(f"{path}/{name}"):
            response = http_backoff("GET", url, headers=headers, follow_redirects=True)
            hf_raise_for_status(response)
        data: bytes = response.content
        return data if response.status_code == 206 else data[start:stop]

    return fetch
