"""The errors of gemma-convert.

    GemmaConvertError        what went wrong, in one line that names the remedy
    |- InputError            a file or directory that cannot be trusted or read
    |- ConfigError           a config.json that is missing, unknown or contradicts the tensors
    |- LayoutError           names or shapes that do not fit the layout
    |- AdapterError          LoRA factors that do not fit the base, or whose scale is unknown
    |- RemoteError           a Hub or a bucket that refuses, is out of reach or holds something else
    |- ClusterError          machines that are out of reach, keep dying, or see other inputs
    `- OutputError           an output that exists, does not fit on the disk, or read back wrong

The command line prints the message and exits 1; a traceback appears only with ``--debug``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemma_convert.convert.printable import one_line

_LONGEST = 1500


class GemmaConvertError(Exception):
    """Base of every error raised on purpose.

    Names and values in it may come from files that are not trusted: the message is one line of
    printable characters, and not a long one, whatever they hold.

    Args:
        what: What is wrong: the tensor or file, what was expected, what was found.
        remedy: What the user can do about it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what = one_line(what, _LONGEST)
        self.remedy = one_line(remedy, _LONGEST)
        super().__init__(f"{self.what}; {self.remedy}" if remedy else self.what)


@contextmanager
def naming(tensor: str) -> Iterator[None]:
    """Begin the message of an `OutputError` raised inside with the tensor's name."""
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{tensor}: {error.what}", error.remedy) from error


class InputError(GemmaConvertError):
    """A file or directory that cannot be trusted or read."""


class ConfigError(GemmaConvertError):
    """A config that is missing, unknown, or contradicts the tensors."""


class LayoutError(GemmaConvertError):
    """Tensor names or shapes that do not fit the layout."""


class AdapterError(GemmaConvertError):
    """LoRA factors that do not fit the base, or whose scale is unknown."""


class RemoteError(GemmaConvertError):
    """A Hub or a bucket that refuses, cannot be reached, or holds something else."""


class ClusterError(GemmaConvertError):
    """Machines that are out of reach, keep dying, or see other inputs than this one."""


class OutputError(GemmaConvertError):
    """An output that exists, does not fit on the disk, or read back wrong."""
