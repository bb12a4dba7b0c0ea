"""Whether an output may be written where the user wants it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
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
        theirs = Path(os.path.realpath(path))  # a link in a circle leads to itself
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


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
