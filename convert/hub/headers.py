"""A model of the Hub by its headers: they are fetched by ranges of bytes, weights when needed."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_convert.convert.awaited import Awaited, Shards
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.hub.kept import Kept
from gemma_convert.convert.hub.names import HubPath
from gemma_convert.convert.hub.remote_state import RemoteFile
from gemma_convert.convert.hub.session import hub_errors, patiently
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
    api: HfApi, path: HubPath, files: Mapping[str, RemoteFile], near: Path
) -> Checkpoint:
    """Open a model whose small files are ``near`` from the headers of its shards alone.

    They are fetched by ranges of bytes and kept. No tensor can be read.

    Args:
        api: Of the Hub.
        path: The model, at a commit.
        files: Its files.
        near: A local directory.
    """
    kept = Kept(path)
    ranges = _ranges(api, path)

    def read(name: str, start: int, stop: int) -> bytes:
        if not (near / name).exists():
            return ranges(name, start, stop)
        with (near / name).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    heads = kept.ranges(read)

    def fetch(name: str, start: int, stop: int) -> bytes:
        return (heads if is_shard(name) else read)(name, start, stop)

    with tempfile.TemporaryDirectory(prefix="gemma-convert-") as name, told_as(str(path), name):
        entries = [(name, RemoteEntry(file.size)) for name, file in files.items()]
        make_skeleton(Path(name), str(path), entries, fetch)
        opened = open_safetensors(Path(name))
    kept.keep_ranges()
    return opened


def open_awaited(
    api: HfApi,
    path: HubPath,
    files: Mapping[str, RemoteFile],
    near: Path,
    names: Collection[str],
    shards: Shards,
) -> Checkpoint:
    """Open a model whose small files are ``near``; each of its shards is fetched when it is read.

    Args:
        api: Of the Hub.
        path: The model, at a commit.
        files: Its files.
        near: A local directory.
        names: The shards that count.
        shards: Fetches them.
    """
    wanted = {name: file for name, file in files.items() if name in names or not is_shard(name)}
    opened = open_headers(api, path, wanted, near)
    tensors = {
        name: Awaited(head, shards)
        for name, head in opened.items()
        if isinstance(head, SafetensorsTensor)
    }
    return opened.replace(tensors=tensors, files=side_files(near) if near.exists() else {})


def _ranges(api: HfApi, path: HubPath) -> Fetch:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status, http_stream_backoff

    def once(name: str, start: int, stop: int) -> bytes:
        url = hf_hub_url(
            path.repo,
            name,
            subfolder=path.folder or None,
            revision=path.revision,
            endpoint=api.endpoint,
        )
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
        data = bytearray()
        with (
            hub_errors(f"{path}/{name}"),
            http_stream_backoff("GET", url, headers=headers, follow_redirects=True) as response,
        ):
            hf_raise_for_status(response)
            # A server that does not know ranges sends the file from its beginning, all of it.
            skipped = 0 if response.status_code == 206 else start
            for block in response.iter_bytes():
                data += block
                if len(data) >= skipped + stop - start:
                    break
        return bytes(data[skipped : skipped + stop - start])

    def fetch(name: str, start: int, stop: int) -> bytes:
        return patiently(lambda: once(name, start, stop))

    return fetch
