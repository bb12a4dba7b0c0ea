"""Run commands in turn; wall time, CPU time and the largest resident set of each."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON = sys.executable


@dataclass(frozen=True)
class Case:
    """A command to measure.

    Attributes:
        name: What the table calls it.
        command: The command line.
        makes: What it writes, removed before and after; None if nothing.
    """

    name: str
    command: Sequence[str]
    makes: Path | None = None


@dataclass(frozen=True)
class Usage:
    """What a process used, its children included.

    Attributes:
        wall: Seconds on the clock.
        cpu: Seconds of user and system time.
        rss: The largest resident set of one process, in bytes.
    """

    wall: float
    cpu: float
    rss: int


def measure(cases: Iterable[Case], rounds: int) -> dict[str, list[Usage]]:
    """Run all cases one after the other, ``rounds`` times.

    Raises:
        SystemExit: If one of them fails.
    """
    used: dict[str, list[Usage]] = {}
    cases = list(cases)
    for number in range(1, rounds + 1):
        for case in cases:
            remove(case.makes)
            used.setdefault(case.name, []).append(usage(case.command))
            remove(case.makes)
            print(f"{number}/{rounds} {case.name}: {used[case.name][-1]}", file=sys.stderr)
    return used


def usage(command: Sequence[str]) -> Usage:
    """Run a command to its end.

    Raises:
        SystemExit: If it fails.
    """
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.monotonic() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    return Usage(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def median(used: Sequence[Usage]) -> Usage:
    """The median of each time, and the largest resident set of all."""
    return Usage(
        statistics.median(one.wall for one in used),
        statistics.median(one.cpu for one in used),
        max(one.rss for one in used),
    )


def remove(path: Path | None) -> None:
    """Remove a directory, if there is one."""
    if path is not None:
        shutil.rmtree(path, ignore_errors=True)
