"""What a process of ours settles before it loads numpy: threads and memory."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_LARGEST = 32 << 20  # the most that glibc takes for its M_MMAP_THRESHOLD
_KEPT = 256 << 20


def set_up() -> None:
    """Let blocks be computed one thread each, in memory that is used again.

    Blocks are computed by threads of ours, beside which BLAS must not start its own. They are of
    megabytes, which glibc gives back to the system after each use, and the system fills the next
    with zeros: a third of a merge's time. What the user's environment says stands.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
