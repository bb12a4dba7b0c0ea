"""An output directory that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gemma_convert.convert.errors import OutputError

SPARE_BYTES = 64 << 20
"""Room left on the disk beyond what is written: index, side files, the file system's own."""


def check_output(out: Path, inputs: Iterable[Path], nbytes: int, *, force: bool) -> None:
    """Refuse an output that would cost the user something, before anything is written.

    Args:
        out: The directory to be made.
        inputs: Directories or files that are read; symlinks are followed.
        nbytes: Bytes that will be written.
        force: Whether a non-empty ``out`` may be replaced.

    Raises:
        OutputError: If ``out`` is, holds or lies in an input, exists, or does not fit on the disk.
    """
    ours = out.resolve()
    if ours in (Path.cwd(), *Path.cwd().parents):
        raise OutputError(f"output {out} is the current directory or holds it", "name a new one")
    for path in inputs:
        theirs = path.resolve()
        if ours == theirs or ours in theirs.parents or theirs in ours.parents:
            raise OutputError(
                f"output {out} and input {path} are the same directory or one holds the other",
                "choose another --out",
            )
    parent = _existing_parent(ours)
    if not parent.is_dir():
        where = f"output {out} exists and" if parent == ours else f"output {out}: {parent}"
        raise OutputError(f"{where} is a file", "choose another --out")
    if out.is_symlink() and not force:
        raise OutputError(
            f"output {out} exists and is a link",
            "choose another --out, or replace the link with --force",
        )
    if out.is_dir() and any(out.iterdir()) and not force:
        raise OutputError(
            f"output {out} exists and is not empty",
            "choose another --out, or replace it with --force",
        )
    free = shutil.disk_usage(parent).free
    if nbytes + SPARE_BYTES > free:
        raise OutputError(
            f"output {out} needs {_gigabytes(nbytes + SPARE_BYTES)}, "
            f"the disk has {_gigabytes(free)} free",
            "free some space or choose another --out",
        )


@contextmanager
def fresh_directory(out: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary sibling of ``out`` that takes its name when the block ends well.

    On any error the sibling is removed and ``out`` stays as it was.

    Args:
        out: The directory to be made.
        force: Whether what stands there in the end may be replaced.

    Raises:
        OutputError: If something has come to stand there meanwhile and ``force`` is off.
    """
    # A link is replaced itself, not what it points to; ".." behind a link is where it points to.
    out = out.resolve() if out.name in ("", "..") else out.parent.resolve() / out.name
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        _set_umask_mode(temporary)
        yield temporary
        _sync_tree(temporary)
        if force and os.path.lexists(out):
            _replace(temporary, out)
        else:
            _rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(out.parent)


def _rename(temporary: Path, out: Path) -> None:
    try:
        temporary.rename(out)  # the system refuses a directory that is not empty
    except OSError as error:
        if not out.exists():
            raise
        raise OutputError(
            f"output {out} was made by something else while this ran",
            "choose another --out, or replace it with --force",
        ) from error


def _replace(temporary: Path, out: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
    old = aside / out.name
    try:
        out.rename(old)
        temporary.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _set_umask_mode(directory: Path) -> None:
    """Give a directory made by mkdtemp (0700) the mode that the user's umask asks for."""
    umask = os.umask(0)
    os.umask(umask)
    directory.chmod(0o777 & ~umask)


def _sync_tree(directory: Path) -> None:
    for root, _, names in os.walk(directory):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
