"""A few transfers at a time, in threads that nobody waits for.

The Hub's own client transfers many files in a pool whose threads Python joins when it ends, so
Ctrl-C would wait for files of gigabytes. Here the caller waits for a queue and for nothing else:
that is where the interrupt arrives, and no library sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic

from gemma_convert.interrupts import check_interrupt

AT_ONCE = 4
_TURN_SECONDS = 0.2
_GRACE_SECONDS = 10.0
_GRACE_OF_INTERRUPTS = 1.0
"""For threads that are told to stop, to clean up."""


def side_by_side(tasks: Iterable[Callable[[], None]], stop: Event | None = None) -> None:
    """Carry out ``tasks`` until the first error or an interrupt.

    Args:
        tasks: Each is carried out in one of `AT_ONCE` threads.
        stop: Set when it ends early, for tasks under way to look at; they have a moment for it.

    Raises:
        KeyboardInterrupt: At once, whatever is under way.
    """
    stop = stop or Event()
    left = deque(tasks)
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        with suppress(IndexError):
            while True:
                task = left.popleft()
                try:
                    task()
                except BaseException as error:  # Xet's library raises KeyboardInterrupt itself
                    ended.put(error)
                else:
                    ended.put(None)

    count = len(left)
    threads = [Thread(target=work, name="hub", daemon=True) for _ in range(AT_ONCE)]
    try:
        for thread in threads[:count]:
            thread.start()
        for _ in range(count):
            if (error := _taken(ended)) is not None:
                raise error
    except BaseException as error:
        left.clear()
        stop.set()
        _abort_xet()
        hasty = isinstance(error, KeyboardInterrupt)
        deadline = monotonic() + (_GRACE_OF_INTERRUPTS if hasty else _GRACE_SECONDS)
        for thread in threads[:count]:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - monotonic()))
        raise


def _taken(ended: SimpleQueue[BaseException | None]) -> BaseException | None:
    """The next result; a thread that is not the main one learns of an interrupt by the flag."""
    while True:
        try:
            return ended.get(timeout=_TURN_SECONDS)
        except Empty:
            check_interrupt()


def _abort_xet() -> None:
    """End the downloads of the library that fetches from Xet storage, if any are under way."""
    with suppress(ImportError):
        from huggingface_hub.utils._xet import abort_xet_session

        abort_xet_session()
