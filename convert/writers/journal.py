"""What of an output is finished: a file of JSON lines beside it, so that a killed run can go on.

The first line says of which run (its identity), every other one names a finished piece, such as a
shard, and what is known of it. A line is on the disk before `Journal.finish` returns. A last line
that was cut off by the end of the process is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert.writers.sync import sync

Record = Mapping[str, Any]


class Journal:
    """The finished pieces of one output.

    Args:
        path: The file; None keeps the journal in memory, for an output that nobody resumes.
        identity: What the output is made of and how; JSON values.
    """

    def __init__(self, path: Path | None = None, identity: Record | None = None) -> None:
        self.path = path
        self.identity = identity
        self.pieces: dict[str, Record] = {}
        self.before: Record | None = None
        """The identity of the run that left the journal, if there was one."""
        if path is None:
            return
        end = self._read(path)
        if self.before is None or self.before != identity:
            self.pieces, end = {}, 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(self._file, end)
        self._end = end
        if not end:
            self._append({"identity": identity})
            sync(path.parent)

    @classmethod
    def peek(cls, path: Path) -> Journal:
        """What ``path`` says, without changing it."""
        journal = cls()
        journal._read(path)
        return journal

    def finish(self, piece: str, record: Record) -> None:
        """Note that ``piece`` is on the disk, synced, and will not be touched again."""
        self.pieces[piece] = record
        if self.path is not None:
            self._append({"finished": piece, "record": record})

    def close(self) -> None:
        """Give the file back."""
        if self.path is not None:
            os.close(self._file)
            self.path = None

    def _append(self, line: Record) -> None:
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], self._end + written)
        os.fsync(self._file)
        self._end += len(data)

    def _read(self, path: Path) -> int:
        """Take in the whole lines of ``path``; return where the last of them ends."""
        end = 0
        if not path.exists():
            return end
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(entry, dict):
                break
            if not end:
                self.before = entry.get("identity")
            else:
                self.pieces[entry["finished"]] = entry["record"]
            end += len(line)
        return end
