"""A lock that one process holds and that vanishes with it, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemma_convert.convert.errors import OutputError

LOCK_NAME = "lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make ``directory`` if need be and hold its lock; ``directory`` may be removed meanwhile.

    The lock is the kernel's (``flock``), so one that a killed process held is free again. The file
    ``lock`` inside only carries it, and says to people which process has it.

    Raises:
        OutputError: If another process holds it, or something of someone else's has the name.
    """
    descriptor = _acquire(directory)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _acquire(directory: Path) -> int:
    while True:
        _make(directory)
        path = directory / LOCK_NAME
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # its last holder has just removed the directory
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise OutputError(
                f"{directory}: another run is writing there (process {holder or 'unknown'})",
                "wait until it ends, or choose another --out",
            ) from error
        if _is_same(path, descriptor):
            return descriptor
        os.close(descriptor)  # the last holder has removed the file between the two calls


def _make(directory: Path) -> None:
    """Make the directory, or see to it that the one there was made by this function."""
    try:
        directory.mkdir(mode=0o700)
        return
    except FileExistsError:
        pass
    try:
        ours = _is_ours(directory)
    except FileNotFoundError:
        return  # gone again: its last holder has removed it
    if not ours:
        raise OutputError(
            f"{directory} is in the way: outputs are made there, and it holds something else",
            "move it elsewhere",
        )


def _is_ours(directory: Path) -> bool:
    if directory.is_symlink() or not directory.is_dir():
        return False
    if directory.stat().st_uid != os.geteuid():
        return False
    return (directory / LOCK_NAME).is_file() or not any(directory.iterdir())


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
