"""Where an output is made until it is whole, so that it appears as a whole, and a run can go on.

Beside the output NAME, on the same file system::

    .NAME.partial/lock       held while a run works here
    .NAME.partial/journal    which run that is, and which pieces are finished
    .NAME.partial/output/    the output so far
    .NAME.partial/whole/     the output once nothing is missing; once swapped, what it replaced
    .NAME.partial/old/       what it replaces, while the system moves it out of the way
    .NAME.partial/tasks/     where other processes write pieces that are not finished

``whole`` takes the output's name by one rename. A run that is killed, interrupted, out of disk or
left by its cluster, the Hub or a bucket leaves this directory if a piece was finished, and the same
command finds it; any other error leaves nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_convert.convert.digests import sha256_of
from gemma_convert.convert.errors import ClusterError, OutputError, RemoteError
from gemma_convert.convert.writers.journal import Journal
from gemma_convert.convert.writers.lock import locked
from gemma_convert.convert.writers.swap import swap
from gemma_convert.convert.writers.sync import sync, sync_tree
from gemma_convert.interrupts import interrupted

SEALED = "sealed"
"""The journal's last piece: the digest of the output's seal, the file that is written last."""

AGAIN = "run the same command again, it goes on from there"


@dataclass(frozen=True)
class Place:
    """The paths of the staging of one output."""

    out: Path

    @classmethod
    def of(cls, out: Path) -> Place:
        """The staging of ``out``, all links but the last resolved."""
        # A link is replaced itself, not what it points to; ".." is resolved behind a link.
        return cls(out.resolve() if out.name in ("", "..") else out.parent.resolve() / out.name)

    @property
    def root(self) -> Path:
        """The directory of it all."""
        return self.out.parent / f".{self.out.name}.partial"

    @property
    def output(self) -> Path:
        """The output so far."""
        return self.root / "output"

    @property
    def whole(self) -> Path:
        """The output once nothing is missing."""
        return self.root / "whole"

    @property
    def old(self) -> Path:
        """What is being replaced."""
        return self.root / "old"

    @property
    def tasks(self) -> Path:
        """Where other processes write pieces that are not finished."""
        return tasks_beside(self.output)

    @property
    def journal(self) -> Path:
        """The journal."""
        return self.root / "journal"


def tasks_beside(output: Path) -> Path:
    """The directory for pieces on their way into ``output``, on the same file system."""
    return output.parent / "tasks"


@contextmanager
def staging(
    out: Path,
    identity: Mapping[str, Any],
    *,
    seal: str,
    force: bool = False,
    changed: Callable[[Mapping[str, Any]], None] = lambda before: None,
) -> Iterator[tuple[Path, Journal]]:
    """A directory that takes the name ``out`` when the block ends well, and its journal.

    Args:
        out: The directory to be made.
        identity: What the output is made of and how. What a run of another identity left is
            removed.
        seal: The file of the output that is written last and is never the same twice.
        force: Whether what stands at ``out`` in the end may be replaced.
        changed: Told the identity of that other run.

    Raises:
        OutputError: If another run is making ``out``, the disk fails or is full, or something has
            come to stand there meanwhile and ``force`` is off.
    """
    place = Place.of(out)
    place.out.parent.mkdir(parents=True, exist_ok=True)
    with locked(place.root):
        _settle(place, seal)
        shutil.rmtree(place.tasks, ignore_errors=True)
        journal = Journal(place.journal, identity)
        try:
            if not journal.pieces:
                _remove(place.output)
            if journal.before not in (None, identity):
                changed(journal.before)
            place.output.mkdir(exist_ok=True)
            yield place.output, journal
            _publish(place, journal, seal, force=force)
        except BaseException as error:
            if interrupted.is_set() and not isinstance(error, KeyboardInterrupt):
                error = KeyboardInterrupt()  # whatever a library has made of it
            _leave(place, journal, error)
            raise error
        finally:
            journal.close()
        _tidy(place)


def already_made(out: Path, identity: Mapping[str, Any], *, seal: str) -> bool:
    """Whether a run of this identity made ``out`` and was killed before it could tidy up.

    If so, or if a run was killed while it replaced ``out``, that is finished or undone here.
    """
    place = Place.of(out)
    if not place.journal.is_file():
        return False
    with locked(place.root):
        made = _settle(place, seal)
        same = made and Journal.peek(place.journal).before == identity
        if made:
            _tidy(place)
        return same


def staged_bytes(out: Path) -> int:
    """Bytes that an earlier run left for ``out``; a run need not write them, or removes them."""
    output = Place.of(out).output
    return sum(path.stat().st_size for path in output.rglob("*") if path.is_file())


def _settle(place: Place, seal: str) -> bool:
    """Bring a publication that was cut short to an end or back; whether ``out`` is its result."""
    if os.path.lexists(place.old) and not os.path.lexists(place.out):
        place.old.rename(place.out)
    sealed = Journal.peek(place.journal).pieces.get(SEALED)
    if sealed is None:
        return False
    if _is_sealed(place.whole / seal, sealed["sha256"]):
        _remove(place.output)
        place.whole.rename(place.output)
        return False
    return _is_sealed(place.out / seal, sealed["sha256"])


def _publish(place: Place, journal: Journal, seal: str, *, force: bool) -> None:
    sync_tree(place.output)
    journal.finish(SEALED, {"sha256": sha256_of(place.output / seal)})
    _remove(place.whole)
    place.output.rename(place.whole)
    sync(place.root)
    if force and os.path.lexists(place.out):
        if not swap(place.whole, place.out):
            _move_aside(place)
    else:
        _rename(place)
    sync(place.out.parent)


def _rename(place: Place) -> None:
    try:
        place.whole.rename(place.out)  # the system refuses a directory that is not empty
    except OSError as error:
        if not place.out.exists():
            raise
        raise OutputError(
            f"output {place.out} was made by something else while this ran",
            "choose another --out, or replace it with --force",
        ) from error


def _move_aside(place: Place) -> None:
    """Replace ``out`` by two renames; `_settle` undoes the first where the second did not come."""
    _remove(place.old)
    place.out.rename(place.old)
    try:
        place.whole.rename(place.out)
    except BaseException:
        if not os.path.lexists(place.out):
            place.old.rename(place.out)
        raise


def _leave(place: Place, journal: Journal, error: BaseException) -> None:
    """Keep what a run can go on from, if the error was none of the data's; else keep nothing."""
    resumable = isinstance(error, KeyboardInterrupt | OSError | ClusterError | RemoteError)
    if not resumable or not journal.pieces:
        _tidy(place)
        if isinstance(error, OSError):
            raise _failed(place, error, "nothing was kept") from error
        if isinstance(error, KeyboardInterrupt):
            error.add_note("nothing was finished, so nothing is kept")
        return
    if isinstance(error, ClusterError | RemoteError):
        remedy = f"{error.remedy}: what is finished is kept; {AGAIN}"
        raise type(error)(error.what, remedy) from error
    if isinstance(error, OSError):
        raise _failed(place, error, f"what is finished is kept; {AGAIN}") from error
    error.add_note(f"what is finished is kept beside {place.out}; {AGAIN}")


def _failed(place: Place, error: OSError, kept: str) -> OutputError:
    where = f" ({error.filename})" if error.filename else ""
    return OutputError(
        f"output {place.out} could not be written: {error.strerror or error}{where}",
        f"see to the free space and permissions there: {kept}",
    )


def _tidy(place: Place) -> None:
    """Remove the staging, the lock last, so that nobody takes what is being removed for a run."""
    for path in (place.output, place.whole, place.old, place.tasks, place.journal):
        _remove(path)
    (place.root / "lock").unlink(missing_ok=True)
    try:
        place.root.rmdir()
    except OSError:
        return  # the next run has come


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_sealed(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_of(path) == digest
