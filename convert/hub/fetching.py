"""Bring files of the Hub into its cache, and see that they are what the Hub lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from shutil import disk_usage
from threading import Event
from typing import TYPE_CHECKING, Any

from gemma_convert.convert.errors import RemoteError
from gemma_convert.convert.hub.local_files import hash_file
from gemma_convert.convert.hub.names import HubPath
from gemma_convert.convert.hub.remote_state import RemoteFile
from gemma_convert.convert.hub.session import (
    PassingError,
    bars_on_terminals,
    gist,
    hub_errors,
    patiently,
)
from gemma_convert.convert.hub.side_by_side import side_by_side

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Files = Mapping[str, RemoteFile]

KEPT = "files that have come whole stay in the Hub's cache; run the same command again to go on"


class _StoppedError(Exception):
    """Ends a download from within."""


def snapshot(path: HubPath) -> Path:
    """Where the Hub's cache has the files of a commit."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    assert path.revision is not None
    folder = repo_folder_name(repo_id=path.repo, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder / "snapshots" / path.revision


def fetch(api: HfApi, path: HubPath, names: Iterable[str], files: Files) -> Path:
    """Bring files into the cache; those that are there already are not asked for.

    Args:
        api: Of the Hub.
        path: A folder at a commit.
        names: Of files in there.
        files: What the Hub says of them: sizes, and digests of large ones.

    Returns:
        The cache's directory for the commit.

    Raises:
        RemoteError: One of them cannot be fetched, or there is no room for them.
    """
    there = snapshot(path) / path.folder
    missing = [name for name in names if not (there / name).exists()]
    with cache_errors(str(path)):
        _require_room(str(path), sum(files[name].size for name in missing))
    stop = Event()
    download = partial(_download, api, path, files, stop)
    with bars_on_terminals():
        try:
            side_by_side([partial(patiently, partial(download, name)) for name in missing], stop)
        except BaseException as error:
            _remove_unfinished(snapshot(path).parents[1] / "blobs")
            if isinstance(error, KeyboardInterrupt):
                error.add_note(KEPT)
            raise
    return snapshot(path)


def _require_room(what: str, nbytes: int) -> None:
    """Refuse to begin what the disk of the cache cannot hold."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    exists = next(place for place in (cache, *cache.absolute().parents) if place.exists())
    free = disk_usage(exists).free
    if nbytes > free:
        raise RemoteError(
            f"{what}: {nbytes / 1e9:.3f} GB are to be fetched, and the Hub's cache {cache} has "
            f"room for {free / 1e9:.3f} GB",
            "free some, or name another place with HF_HUB_CACHE",
        )


def _download(api: HfApi, path: HubPath, files: Files, stop: Event, name: str) -> None:
    what = f"{path}/{name}"
    if stop.is_set():
        raise _StoppedError
    with cache_errors(what), hub_errors(what):
        found = Path(
            api.hf_hub_download(
                path.repo,
                f"{path.folder}/{name}" if path.folder else name,
                revision=path.revision,
                tqdm_class=_bar(stop),
            )
        )
        arrived = hash_file(name, found, lambda nbytes: None)
        listed = files[name]
        if listed.is_same(arrived):
            return
        found.resolve().unlink()
        found.unlink(missing_ok=True)
    raise PassingError(
        f"{what}: what arrived is another file than the Hub lists: expected {listed.size} bytes, "
        f"{listed.digest}, found {arrived.size} bytes, sha256:{arrived.sha256}",
        "run the same command again",
    )


@contextmanager
def cache_errors(what: str) -> Iterator[None]:
    """Tell of the disk with the Hub's cache in one line that begins with ``what``."""
    from huggingface_hub import constants

    try:
        yield
    except OSError as error:
        if error.errno is None:  # what the client says of a file of the wrong size
            raise PassingError(
                f"{what}: it did not arrive whole: {gist(error)}", "run the same command again"
            ) from error
        where = error.filename or constants.HF_HUB_CACHE
        raise RemoteError(
            f"{what}: the Hub's cache cannot take it: {error.strerror} ({where})",
            "see to the free space and permissions there, or name another place with HF_HUB_CACHE",
        ) from error


def _bar(stop: Event) -> type[Any]:
    """The Hub's progress bar; the download that tells it each block ends once ``stop`` is set."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> Any:
            if stop.is_set():
                raise _StoppedError
            return super().update(n)

    return Bar


def _remove_unfinished(blobs: Path) -> None:
    """Remove what threads that did not end have open there: no later run goes on with it."""
    with suppress(OSError):  # only Linux lists them so
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                file = descriptor.readlink()
                if file.suffix == ".incomplete" and file.parent == blobs.resolve():
                    file.unlink()
