"""Runs of the command line that are killed at a chosen point, as ``kill -9`` does.

``python -m tests.killed`` reads requests, one JSON line each, and carries each out in a fork of
itself, so that a run costs no imports. Points are counted in calls of C functions by the main
thread after the output's lock was taken: reads, writes, renames, and whatever lies between them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Killer:
    """A process that runs and kills commands."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.killed", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=Path(__file__).parents[1],
        )

    def __enter__(self) -> Killer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def run(self, *words: Any, at: int = 0) -> tuple[int, int]:
        """Run ``gemma-convert`` with ``words``, killed at point ``at`` if there is that one.

        Returns:
            The exit status, negative if it was killed, and the number of points passed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([list(map(str, words)), at]), file=self.process.stdin, flush=True)
        status, points = json.loads(self.process.stdout.readline())
        return status, points


def _carry_out(words: list[str], at: int) -> tuple[int, int]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        _run(words, at, write)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        points = int(pipe.read() or 0)
    return os.waitstatus_to_exitcode(status), points


def _run(words: list[str], at: int, pipe: int) -> None:
    """In the child: count, run, tell the count, end."""
    from gemma_convert.cli import main
    from gemma_convert.convert.writers import staging

    points = 0

    def count(frame: FrameType, event: str, function: Any) -> None:
        nonlocal points
        if event == "c_call":
            points += 1
            if points == at:
                os.kill(os.getpid(), signal.SIGKILL)

    locked = staging.locked

    def from_here(directory: Path) -> Any:
        sys.setprofile(count)
        return locked(directory)

    staging.locked = from_here  # type: ignore[assignment]
    os.dup2(2, 1)
    status = main(words)
    sys.setprofile(None)
    os.write(pipe, str(points).encode())
    os._exit(status)


def _serve(modules: list[str]) -> None:
    for module in ("gemma_convert.convert.commands.execute", *modules):
        __import__(module)
    for line in sys.stdin:
        print(json.dumps(_carry_out(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1:])
