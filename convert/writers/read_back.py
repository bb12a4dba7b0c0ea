"""Read a file again behind its writer, in a thread: compare every block and hash the whole."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.tensor import Array

AHEAD = 2
"""Blocks that the writer may be ahead; each is in memory until it is compared."""

_START_BYTES = 64 << 20
"""How much is compared before the system is told to write it to the disk."""

FAILING = "the disk or its file system is failing; nothing was kept"
"""The remedy for values that are not what was written."""


class ReadBack:
    """What a file holds, as its blocks are written one behind the other.

    Used as a context; nothing of it is under way once that ends.

    Args:
        path: A file that exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = hashlib.sha256()
        self._buffer = np.empty(0, np.uint8)
        self._position = 0
        self._started = 0
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-back")

    def __enter__(self) -> ReadBack:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._descriptor)

    def expect(self, name: str, data: Array) -> None:
        """The file's next bytes have been written: ``data``, a part of ``name``."""
        self._pending.append((data.nbytes, self._pool.submit(self._compare, name, data)))

    def compared(self, *, most: int = AHEAD) -> int:
        """Wait until at most ``most`` blocks are left to compare.

        Returns:
            How many bytes were compared since this was asked last.

        Raises:
            OutputError: If some of them were not what was written.
        """
        total = 0
        while self._pending and (len(self._pending) > most or self._pending[0][1].done()):
            nbytes, future = self._pending.popleft()
            future.result()
            total += nbytes
        return total

    def sha256(self) -> str:
        """The digest of what was compared."""
        return self._hash.hexdigest()

    def _compare(self, name: str, data: Array) -> None:
        if self._buffer.size < data.size:
            self._buffer = np.empty(data.size, np.uint8)
        found = self._buffer[: data.size]
        if not self._read(found.data) or not np.array_equal(found, data):
            raise OutputError(
                f"{self.path}: {name}: the values read back differ from those written", FAILING
            )
        self._hash.update(found.data)
        if self._position - self._started >= _START_BYTES:
            self._start_writing()

    def _start_writing(self) -> None:
        """Have the system write what lies behind, rather than all of it when it is synced."""
        length = self._position - self._started
        if hasattr(os, "posix_fadvise"):
            # For pages that are not on the disk yet, Linux takes this as: begin to write them.
            os.posix_fadvise(self._descriptor, self._started, length, os.POSIX_FADV_DONTNEED)
        self._started = self._position

    def _read(self, target: memoryview) -> bool:
        """Fill ``target`` with the file's next bytes; False if there are not so many."""
        while target:
            count = os.preadv(self._descriptor, [target], self._position)
            if count == 0:
                return False
            target, self._position = target[count:], self._position + count
        return True
