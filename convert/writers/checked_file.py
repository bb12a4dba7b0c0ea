"""Write a file past the page cache, and read all of it from the disk again, behind the writer.

Where the file system allows it (``O_DIRECT`` of Linux), the bytes go straight to the disk and come
straight from it: what is compared is what the disk holds, the memory that the system caches with
stays free for others, and nothing is copied into it. Elsewhere the same calls go through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from bisect import bisect
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.tensor import Array

CHUNK_BYTES = 4 << 20
"""Written and compared at a time; a multiple of what any disk calls a sector."""

CHUNKS = 3
"""In memory: one is filled while the others are compared."""

FAILING = "the disk or its file system is failing; nothing was kept"
"""The remedy for values that are not what was written."""

_SECTOR = 4096


class _Chunk:
    """A part of the file, in pages of its own as direct writes need them."""

    def __init__(self) -> None:
        self.array = np.frombuffer(mmap.mmap(-1, CHUNK_BYTES), np.uint8)
        self.clear(0)

    def clear(self, offset: int) -> None:
        self.offset = offset
        self.used = 0
        self.starts: list[int] = []
        self.names: list[str] = []

    def take(self, name: str, data: Array) -> int:
        """Take as many of the bytes as there is room for."""
        size = min(data.size, CHUNK_BYTES - self.used)
        self.array[self.used : self.used + size] = data[:size]
        self.starts.append(self.used)
        self.names.append(name)
        self.used += size
        return size

    @property
    def sectors(self) -> memoryview:
        """What is used, up to the end of its last sector."""
        return self.array.data[: -(-self.used // _SECTOR) * _SECTOR]

    def differing(self, found: Array) -> str | None:
        """Whose bytes the first are that ``found`` has otherwise, if any."""
        expected = self.array[: self.used]
        if np.array_equal(found, expected):
            return None
        return self.names[bisect(self.starts, int(np.argmax(found != expected))) - 1]


class CheckedFile:
    """A new file, written from its beginning to its end.

    Used as a context; nothing of it is under way once that ends.

    Args:
        path: Of the file; there must be none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        self._found = _Chunk()
        self._free = [_Chunk() for _ in range(CHUNKS)]
        self._pending: deque[Future[_Chunk]] = deque()
        self._compared = 0
        self._writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        _use_cache(self._writer, False)
        _use_cache(self._reader, False)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-back")

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._writer)
        os.close(self._reader)

    def write(self, name: str, data: Array) -> None:
        """Append bytes; ``name`` says whose they are if they do not come back.

        Raises:
            OutputError: If bytes written before came back otherwise.
        """
        while data.size:
            chunk = self._free[-1]
            data = data[chunk.take(name, data) :]
            if chunk.used == CHUNK_BYTES:
                self._flush()

    def finish(self) -> str:
        """Wait until all is compared and on the disk.

        Returns:
            The sha256 of the file, in hexadecimal, of what was read.

        Raises:
            OutputError: If something came back otherwise than it was written.
        """
        self._flush()
        os.ftruncate(self._writer, self.size)
        while self._pending:
            self._collect()
        os.fsync(self._writer)
        return self._hash.hexdigest()

    def compared(self) -> int:
        """How many bytes were compared since this was asked last."""
        count, self._compared = self._compared, 0
        return count

    def _flush(self) -> None:
        """Write the chunk that fills, in whole sectors, and have it compared."""
        chunk = self._free.pop()
        write_at(self._writer, chunk.sectors, chunk.offset)
        self.size = chunk.offset + chunk.used
        self._pending.append(self._pool.submit(self._compare, chunk))
        if not self._free:
            self._collect()
        self._free[-1].clear(self.size)

    def _collect(self) -> None:
        chunk = self._pending.popleft().result()
        self._compared += chunk.used
        self._free.append(chunk)

    def _compare(self, chunk: _Chunk) -> _Chunk:
        self._found.used = chunk.used
        count = _read_at(self._reader, self._found.sectors, chunk.offset, chunk.used)
        found = self._found.array[: chunk.used]
        found[count:] = ~chunk.array[count : chunk.used]  # what is not there differs
        name = chunk.differing(found)
        if name is not None:
            raise OutputError(
                f"{self.path}: {name}: the values read back differ from those written", FAILING
            )
        self._hash.update(found.data)
        return chunk


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``."""
    _transfer(os.pwrite, descriptor, data, offset, len(data))


def _read_at(descriptor: int, target: memoryview, offset: int, needed: int) -> int:
    """Fill ``target`` with at least ``needed`` bytes; returns how many there are."""

    def read(file: int, data: memoryview, at: int) -> int:
        return os.preadv(file, [data], at)

    return _transfer(read, descriptor, target, offset, needed)


def _transfer(
    move: Callable[[int, memoryview, int], int],
    descriptor: int,
    data: memoryview,
    offset: int,
    needed: int,
) -> int:
    done = 0
    while done < needed:
        try:
            count = move(descriptor, data[done:], offset + done)
        except OSError as error:
            # The sectors are larger, or a disk that fills took a part of one.
            if error.errno != errno.EINVAL or not _use_cache(descriptor, True):
                raise
            continue
        if count == 0:
            break
        done += count
    return done


def _use_cache(descriptor: int, use: bool) -> bool:
    """Go through the page cache or past it; whether that changed anything."""
    direct = getattr(os, "O_DIRECT", 0)
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    after = before & ~direct if use else before | direct
    if after == before:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, after)
    except OSError:
        return False
    return True
