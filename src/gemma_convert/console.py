"""What every command shares: options, progress, JSON, sizes as people write them."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from gemma_convert.interrupts import check_interrupt

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_PLAIN_SECONDS = 10.0
_CONTROL = re.compile(r"[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What json.dumps leaves as it is and a terminal acts upon, or cannot be encoded."""

_SECRET = ("--api-key", "--api-key-b")
"""Options whose values are nobody else's."""


class ByteSize(click.ParamType[int]):
    """A size such as ``5GB``, ``200MB``, ``512MiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse ``value`` into bytes."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?", value.strip().lower())
        if found is None or not (size := int(float(found[1]) * _UNITS[found[2] or ""])):
            self.fail(f"{value!r} is not a size such as 5GB or 512MiB", param, ctx)
        return size


def output_options(command: Command) -> Command:
    """``--json``, ``--quiet`` and ``--debug``."""
    for option in (
        click.option("--debug", is_flag=True, help="Show a traceback on errors."),
        click.option("--quiet", is_flag=True, help="Print nothing but errors."),
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    ):
        command = option(command)
    return _with_debug(command)


def _with_debug(command: Command) -> Command:
    @functools.wraps(command)
    def wrapped(*args: Any, debug: bool, **kwargs: Any) -> Any:
        click.get_current_context().find_root().ensure_object(dict)["debug"] = debug
        return command(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def command_line() -> list[str]:
    """The command being run, as a user types it, without secrets: reports and ledgers keep it."""
    state = click.get_current_context().find_root().ensure_object(dict)
    words: list[str] = []
    for word in state.get("arguments", ()):
        option, equals, _ = word.partition("=")
        secret = bool(words) and words[-1] in _SECRET
        words.append("***" if secret else f"{option}=***" if equals and option in _SECRET else word)
    return ["gemma-convert", *words]


def print_json(value: Any) -> None:
    """Print ``value`` for machines; on a terminal too it does nothing but show.

    JSON has no number that is not finite: such a one becomes the string ``"NaN"``, ``"Infinity"``
    or ``"-Infinity"``, as in the JSON of protocol buffers.
    """
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    return value


@contextmanager
def progress(label: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show progress in bytes on stderr: a bar on a terminal, else a line now and then.

    Yields:
        A function to call with the number of bytes done since the last call.
    """
    if quiet:
        yield _interruptible(lambda nbytes: None)
    elif sys.stderr.isatty():
        with _bar(label, total) as advance:
            yield _interruptible(advance)
    else:
        yield _interruptible(_lines(label, total))


def _interruptible(advance: Callable[[int], None]) -> Callable[[int], None]:
    """``advance``, that ends the run where a signal's own exception was lost."""

    def checked(nbytes: int) -> None:
        check_interrupt()
        advance(nbytes)

    return checked


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _lines(label: str, total: int) -> Callable[[int], None]:
    done = 0
    start = last = time.monotonic()

    def advance(nbytes: int) -> None:
        nonlocal done, last
        done += nbytes
        now = time.monotonic()
        if done and now - last >= _PLAIN_SECONDS:
            last = now
            rate = done / (now - start)
            left = (total - done) / rate
            click.echo(
                f"{label}: {done / 1e9:.2f} of {total / 1e9:.2f} GB, "
                f"{rate / 1e6:.0f} MB/s, {left:.0f} s left",
                err=True,
            )

    return advance


def size_text(nbytes: int) -> str:
    """Bytes for people: ``536.2 MB``."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
