"""Read a file again behind its writer, in a thread: compare every block and hash the whole."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from gemma_convert.convert.errors import OutputError

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
        self._buffer = bytearray()
        self._position = 0
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

    def expect(self, name: str, nbytes: int, crc: int) -> None:
        """The file's next ``nbytes`` have been written: a part of ``name`` with this CRC-32."""
        self._pending.append((nbytes, self._pool.submit(self._compare, name, nbytes, crc)))

    def compared(self, *, wait: bool = False) -> int:
        """How many bytes were compared since this was asked last; ``wait`` for one block more.

        Raises:
            OutputError: If some of them were not what was written.
        """
        total = 0
        while self._pending and (wait or self._pending[0][1].done()):
            nbytes, future = self._pending.popleft()
            future.result()
            total, wait = total + nbytes, False
        return total

    def sha256(self) -> str:
        """The digest of what was compared."""
        return self._hash.hexdigest()

    def _compare(self, name: str, nbytes: int, crc: int) -> None:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        with memoryview(self._buffer)[:nbytes] as view:
            done = 0
            while done < nbytes:
                count = os.preadv(self._descriptor, [view[done:]], self._position + done)
                if count == 0:
                    break
                done += count
            if done < nbytes or zlib.crc32(view) != crc:
                raise OutputError(
                    f"{self.path}: {name}: the values read back differ from those written", FAILING
                )
            self._hash.update(view)
        self._position += nbytes
