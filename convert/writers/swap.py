"""Give a directory another's name in one step, where the system can."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def swap(one: Path, other: Path) -> bool:
    """Exchange the names of two paths in one step, by Linux' ``renameat2``.

    Returns:
        Whether it was done; False where the system or the file system has no such call.

    Raises:
        OSError: If it has, and the call failed.
    """
    renameat2 = _renameat2()
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@cache
def _renameat2() -> Any:
    """The C library's function (glibc 2.28, musl 1.2.6), or None."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = (
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_uint,
        )
    return function
