"""What no input may do: run long, take much memory, or raise anything but an error of ours."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemma_convert.convert.errors import GemmaConvertError

SECONDS = 20.0
"""Time for one input, of which each takes milliseconds: many times what a busy machine adds."""

MEMORY = 4 << 30
"""Address space beyond what the process has, in bytes. An input is of kilobytes; but each thread
reserves tens of MiB without using them, and tensorstore starts some for every core."""

MESSAGE = 3000
"""Longest message, in characters."""


class HangError(BaseException):
    """An input took longer than `SECONDS`; no ``except Exception`` stops it."""


def _hang(number: int, frame: Any) -> None:
    raise HangError


@contextmanager
def bounded_time() -> Iterator[None]:
    """Raise `HangError` where the block takes longer than `SECONDS`."""
    before = signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let an allocation beyond `MEMORY` fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def check_message(error: GemmaConvertError) -> None:
    """The promise of every error: one line, of characters that a terminal only shows."""
    text = str(error)
    assert text.isprintable(), f"control characters in {text!r}"
    assert 0 < len(text) <= MESSAGE, f"{len(text)} characters: {text[:200]!r}"
