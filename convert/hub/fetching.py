"""Bring files of the Hub into its cache, some at a time, in threads that nobody waits for.

The Hub's own client downloads many files in a pool whose threads Python joins when it ends, so
Ctrl-C would wait for files of gigabytes. Here the caller waits for a queue and for nothing else:
that is where the interrupt arrives, and no library sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from gemma_convert.convert.hub.names import HubPath
from gemma_convert.convert.hub.session import bars_on_terminals, hub_errors, patiently
from gemma_convert.interrupts import check_interrupt

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_AT_ONCE = 4
_TURN_SECONDS = 0.2
_GRACE_SECONDS = 1.0
"""For threads that are told to stop, to remove what they have of a file."""

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


def fetch(api: HfApi, path: HubPath, names: Iterable[str]) -> Path:
    """Bring files into the cache; those that are there already are not asked for.

    Args:
        api: Of the Hub.
        path: A folder at a commit.
        names: Of files in there.

    Returns:
        The cache's directory for the commit.

    Raises:
        RemoteError: One of them cannot be fetched.
    """
    there = snapshot(path) / path.folder
    missing = [name for name in names if not (there / name).exists()]
    stop = Event()
    download = partial(_download, api, path, _bar(stop))
    with bars_on_terminals():
        try:
            _side_by_side([partial(patiently, partial(download, name)) for name in missing], stop)
        except BaseException as error:
            _remove_unfinished(snapshot(path).parents[1] / "blobs")
            if isinstance(error, KeyboardInterrupt):
                error.add_note(KEPT)
            raise
    return snapshot(path)


def _download(api: HfApi, path: HubPath, bar: type[Any], name: str) -> None:
    with hub_errors(f"{path}/{name}"):
        api.hf_hub_download(
            path.repo,
            f"{path.folder}/{name}" if path.folder else name,
            revision=path.revision,
            tqdm_class=bar,
        )


def _bar(stop: Event) -> type[Any]:
    """The Hub's progress bar; the download that tells it each block ends once ``stop`` is set."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> Any:
            if stop.is_set():
                raise _StoppedError
            return super().update(n)

    return Bar


def _side_by_side(tasks: Iterable[Callable[[], None]], stop: Event) -> None:
    """Carry out ``tasks`` in a few threads until the first error or an interrupt; then ``stop``."""
    left = deque(tasks)
    ended: SimpleQueue[Exception | None] = SimpleQueue()

    def work() -> None:
        with suppress(IndexError):
            while True:
                task = left.popleft()
                try:
                    task()
                except Exception as error:
                    ended.put(error)
                else:
                    ended.put(None)

    count = len(left)
    threads = [Thread(target=work, name="hub-fetch", daemon=True) for _ in range(_AT_ONCE)]
    try:
        for thread in threads[:count]:
            thread.start()
        for _ in range(count):
            if (error := _taken(ended)) is not None:
                raise error
    except BaseException:
        left.clear()
        stop.set()
        _abort_xet()
        deadline = monotonic() + _GRACE_SECONDS
        for thread in threads[:count]:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - monotonic()))
        raise


def _taken(ended: SimpleQueue[Exception | None]) -> Exception | None:
    """The next result; a thread that is not the main one learns of an interrupt by the flag."""
    while True:
        try:
            return ended.get(timeout=_TURN_SECONDS)
        except Empty:
            check_interrupt()


def _abort_xet() -> None:
    """End the downloads of the library that fetches from Xet storage, if any are under way."""
    with suppress(ImportError):
        from huggingface_hub.utils._xet import abort_xet_session

        abort_xet_session()


def _remove_unfinished(blobs: Path) -> None:
    """Remove what threads that did not end have open there: no later run goes on with it."""
    with suppress(OSError):  # only Linux lists them so
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                file = descriptor.readlink()
                if file.suffix == ".incomplete" and file.parent == blobs.resolve():
                    file.unlink()
