"""Read from the Hub: the files that a conversion needs, at one commit, into the Hub's own cache."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_convert.convert.awaited import Shards
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError, RemoteError
from gemma_convert.convert.hub.fetching import fetch
from gemma_convert.convert.hub.headers import at_commit, open_awaited, open_headers
from gemma_convert.convert.hub.names import HubPath, parse_hub_path
from gemma_convert.convert.hub.session import (
    OfflineError,
    PassingError,
    hub_api,
    hub_errors,
    patiently,
)
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.orbax_steps import TREE_FILE, find_tree
from gemma_convert.convert.readers.safetensors import CONFIG_NAME
from gemma_convert.convert.readers.safetensors_index import find_index
from gemma_convert.convert.readers.skeleton import (
    INDEX_SUFFIX,
    is_orbax_head,
    is_shard,
    is_small,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi


def open_hub(
    url: str, step: int | None = None, *, base: bool = False, headers_only: bool = False
) -> Checkpoint:
    """Open a model or an Orbax checkpoint on the Hub; see `open_remote`.

    Raises:
        InputError: Nothing there that can be read.
        RemoteError: No access, or no connection and nothing in the cache.
    """
    from gemma_convert.convert.readers.base import open_base
    from gemma_convert.convert.readers.directory import open_checkpoint

    path = parse_hub_path(url)
    api = hub_api()
    notes: tuple[str, ...] = ()
    try:
        commit, sizes = patiently(lambda: _listed(api, path))
    except RemoteError as error:
        local = _cached(path, error)
        pinned = HubPath(path.repo, local.name, path.folder)
        notes = (f"{path}: the Hub is out of reach, what the cache has of it is used",)
    else:
        pinned = HubPath(path.repo, commit, path.folder)
        if headers_only and any(is_shard(name) for name in sizes):
            return open_headers(api, pinned, sizes)
        local = _fetched(api, pinned, sizes, step, shards=not base)
        shards = _shards(local / path.folder, sizes) if base else []
        if not all((local / path.folder / name).exists() for name in shards):
            files = Shards(lambda names: fetch(api, pinned, names) / path.folder)
            return open_awaited(api, pinned, sizes, local / path.folder, shards, files)
    directory = local / path.folder
    opened = open_base(directory) if base else open_checkpoint(directory, step)
    return at_commit(opened, pinned, notes)


def _listed(api: HfApi, path: HubPath) -> tuple[str, dict[str, int]]:
    """The commit that a revision stands for, and the sizes of the files in the folder."""
    from huggingface_hub.hf_api import RepoFile

    with hub_errors(str(path)):
        commit = api.resolve_revision(path.repo, revision=path.revision).resolved
        prefix = f"{path.folder}/" if path.folder else ""
        found = {
            entry.path.removeprefix(prefix): entry.size
            for entry in api.list_repo_tree(path.repo, recursive=True, revision=commit)
            if isinstance(entry, RepoFile) and entry.path.startswith(prefix)
        }
    if not found:
        raise InputError(f"{path} holds no files", "check the path")
    return commit, found


def _fetched(
    api: HfApi, path: HubPath, names: Iterable[str], step: int | None, *, shards: bool
) -> Path:
    """The snapshot directory of the cache, with what is needed in it; the shards only if wanted."""
    there = list(names)
    if any(is_orbax_head(name) for name in there) and not any(is_shard(n) for n in there):
        return _fetched_orbax(api, path, there, step)
    small = [name for name in there if is_small(name)]
    local = fetch(api, path, small) if small else Path()
    weights = _shards(local / path.folder, there)
    if not weights and CONFIG_NAME not in small:
        listed = ", ".join(there[:5])
        raise InputError(
            f"{path} holds neither safetensors nor an Orbax checkpoint, but {listed}",
            "give the repository, or the folder in it, with the weights",
        )
    return fetch(api, path, weights) if weights and (shards or not small) else local


def _shards(directory: Path, there: Iterable[str]) -> list[str]:
    """The files of weights: those that an index names, if there is one.

    What it says of files that are not there is judged when it is opened.
    """
    names = [name for name in there if is_shard(name)]
    if not any("/" not in name and name.endswith(INDEX_SUFFIX) for name in there):
        return names
    found = find_index(directory)
    weight_map = read_object(found).get("weight_map") if found else None
    if not isinstance(weight_map, dict):
        return []
    return sorted({name for name in weight_map.values() if isinstance(name, str)} & {*names})


def _fetched_orbax(api: HfApi, path: HubPath, there: list[str], step: int | None) -> Path:
    """The files that tell trees and steps first, then all of the one tree that is read."""
    local = fetch(api, path, [name for name in there if is_orbax_head(name)])
    top = local / path.folder
    tree = find_tree(top, step).tree.relative_to(top).as_posix()
    inside = "" if tree == "." else f"{tree}/"
    return fetch(api, path, [name for name in there if name.startswith(inside)])


def _cached(path: HubPath, error: RemoteError) -> Path:
    """The snapshot that an earlier run fetched, where the Hub is out of reach.

    Raises:
        RemoteError: ``error``, unless it is about the connection and there is such a snapshot.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not isinstance(error, PassingError | OfflineError):
        raise error
    inside = f"{glob.escape(path.folder)}/" if path.folder else ""
    heads = [inside + name for name in (CONFIG_NAME, "adapter_config.json", TREE_FILE)]
    try:
        return Path(
            snapshot_download(
                path.repo, revision=path.revision, local_files_only=True, allow_patterns=heads
            )
        )
    except LocalEntryNotFoundError:
        raise error from None
