"""Open files that are files: a pipe would be waited for, a device would never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from gemma_convert.convert.errors import InputError


def open_regular(path: Path) -> BinaryIO:
    """Open ``path``, or what it links to, for reading.

    Raises:
        InputError: If it is a pipe, a device, a socket or a directory.
        OSError: If it cannot be opened.
    """
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: Path) -> int:
    """`open_regular`, for those who read by descriptor and close it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise _special(path)
    # It may be another file by now, so it is opened without waiting and looked at again.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _special(path)
    return descriptor


def refuse_special(path: Path) -> None:
    """Raise InputError if ``path`` is there and neither a file nor a directory."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise _special(path)


def _special(path: Path) -> InputError:
    return InputError(
        f"{path} is no regular file but a pipe, device, socket or directory",
        "give the file itself",
    )
