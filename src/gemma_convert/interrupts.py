"""Ctrl-C and SIGTERM: an exception in the main thread, and a flag that no library can swallow.

Python drops an exception that a signal raises inside a garbage collector's callback, and libraries
wrap what is raised inside their own handlers. The flag tells all threads, and `main`, all the same.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from threading import Event
from types import FrameType

interrupted = Event()
"""Set once either signal has arrived."""


def watch() -> None:
    """From now on SIGTERM ends the program as Ctrl-C does, so that it can be resumed."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a shell's background jobs
        signal.signal(signal.SIGINT, _interrupt)


def check_interrupt() -> None:
    """Raise KeyboardInterrupt, in whatever thread, if a signal has arrived."""
    if interrupted.is_set():
        raise KeyboardInterrupt


def end(status: int) -> int:
    """End the program with ``status``, after an interrupt without waiting for other threads.

    What arrives from here on comes too late to change what ``status`` says.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if interrupted.is_set():
        atexit._run_exitfuncs()  # temporary directories are removed
        with suppress(OSError):  # of a pipe that nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    interrupted.set()
    raise KeyboardInterrupt
