"""Read from the Hub: the files that a conversion needs, at one commit, into the Hub's own cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_convert.convert.awaited import Shards
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.digests import unstamped
from gemma_convert.convert.errors import InputError, RemoteError
from gemma_convert.convert.hub.fetching import Files, fetch, snapshot
from gemma_convert.convert.hub.headers import open_awaited, open_headers
from gemma_convert.convert.hub.kept import Kept
from gemma_convert.convert.hub.names import HubPath, parse_hub_path
from gemma_convert.convert.hub.remote_state import RemoteFile, list_remote
from gemma_convert.convert.hub.session import (
    OfflineError,
    PassingError,
    hub_api,
    hub_errors,
    patiently,
)
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.orbax_steps import find_tree
from gemma_convert.convert.readers.safetensors import CONFIG_NAME
from gemma_convert.convert.readers.safetensors_index import find_index
from gemma_convert.convert.readers.skeleton import (
    INDEX_SUFFIX,
    is_beside_arrays,
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
        RemoteError: No access, or no connection and too little in the cache.
    """
    from gemma_convert.convert.readers.base import open_base
    from gemma_convert.convert.readers.directory import open_checkpoint

    path = parse_hub_path(url)
    api = hub_api()
    notes: tuple[str, ...] = ()
    try:
        pinned, files = patiently(lambda: _listed(api, path))
    except RemoteError as error:
        pinned, files = _known(api, path, error)
        notes = (f"{path}: the Hub is out of reach, what the cache has of it is used",)
    heads = base or headers_only
    local = _fetched(api, pinned, files, step, shards=not heads)
    directory = local / path.folder
    shards = _shards(directory, files) if heads else []
    if all((directory / name).exists() for name in shards):
        opened = open_base(directory) if base else open_checkpoint(directory, step)
    elif headers_only:
        opened = open_headers(api, pinned, files, directory)
    else:
        awaited = Shards(lambda names: fetch(api, pinned, names, files) / path.folder)
        opened = open_awaited(api, pinned, files, directory, shards, awaited)
    return _at_commit(opened, pinned, notes)


def _listed(api: HfApi, path: HubPath) -> tuple[HubPath, dict[str, RemoteFile]]:
    """The commit that a revision stands for, and the files in the folder; both are kept."""
    with hub_errors(str(path)):
        commit = api.resolve_revision(path.repo, revision=path.revision).resolved
        listed = list_remote(api, path.repo, commit)
    prefix = f"{path.folder}/" if path.folder else ""
    found = {
        name.removeprefix(prefix): file for name, file in listed.items() if name.startswith(prefix)
    }
    if not found:
        raise InputError(f"{path} holds no files", "check the path")
    pinned = HubPath(path.repo, commit, path.folder)
    Kept(pinned).keep_files(found)
    return pinned, found


def _known(api: HfApi, path: HubPath, error: RemoteError) -> tuple[HubPath, dict[str, RemoteFile]]:
    """The same, as an earlier run learned it or as another program left it in the cache.

    Raises:
        RemoteError: ``error``, unless it is about the connection and something is known.
    """
    from huggingface_hub.errors import RevisionResolutionError

    if not isinstance(error, PassingError | OfflineError):
        raise error
    try:
        commit = api.resolve_revision(
            path.repo, revision=path.revision, local_files_only=True
        ).resolved
    except RevisionResolutionError:
        raise error from None
    pinned = HubPath(path.repo, commit, path.folder)
    directory = snapshot(pinned) / path.folder
    found = Kept(pinned).files() or {
        file.relative_to(directory).as_posix(): RemoteFile(file.stat().st_size, "")
        for file in directory.rglob("*")
        if file.is_file()
    }
    if not found:
        raise error
    return pinned, found


def _at_commit(opened: Checkpoint, path: HubPath, notes: tuple[str, ...]) -> Checkpoint:
    """``opened`` under its name on the Hub, whose commit says more than when a copy was made."""
    return opened.replace(
        source=str(path),
        notes=(*notes, *opened.notes),
        fingerprint=unstamped(opened.fingerprint),
    )


def _fetched(api: HfApi, path: HubPath, files: Files, step: int | None, *, shards: bool) -> Path:
    """The snapshot directory of the cache, with what is needed in it; the shards only if wanted."""
    if any(is_orbax_head(name) for name in files) and not any(is_shard(n) for n in files):
        return _fetched_orbax(api, path, files, step)
    small = [name for name in files if is_small(name)]
    local = fetch(api, path, small, files)
    weights = _shards(local / path.folder, files)
    if not weights and CONFIG_NAME not in small:
        listed = ", ".join(list(files)[:5])
        raise InputError(
            f"{path} holds neither safetensors nor an Orbax checkpoint, but {listed}",
            "give the repository, or the folder in it, with the weights",
        )
    return fetch(api, path, weights, files) if shards else local


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


def _fetched_orbax(api: HfApi, path: HubPath, files: Files, step: int | None) -> Path:
    """The files that tell trees and steps first, then all of the one tree that is read."""
    local = fetch(api, path, [name for name in files if is_beside_arrays(name)], files)
    top = local / path.folder
    tree = find_tree(top, step).tree.relative_to(top).as_posix()
    inside = "" if tree == "." else f"{tree}/"
    return fetch(api, path, [name for name in files if name.startswith(inside)], files)
