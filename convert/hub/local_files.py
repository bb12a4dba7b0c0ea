"""Files that go to the Hub: regular ones inside a directory, hashed once, watched for changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gemma_convert.convert.errors import InputError

BLOCK_BYTES = 8 << 20

_BLOB_LIMIT = 64 << 20
"""Larger files are never stored as plain git blobs: the Hub's limit for those is 10 MB."""

_COPY = "copy what it points to into the directory"

Signature = tuple[int, int, int]


@dataclass(frozen=True)
class PushFile:
    """A file as it will lie in the repository.

    Attributes:
        name: Its path there.
        size: Bytes.
        sha256: Digest of its content, as git LFS names it, in hexadecimal.
        blob: SHA-1 that git names it by; empty for a large file.
        path: Where its bytes lie, if on the disk.
        data: Its bytes, if in memory.
        signature: Inode, size and time of change of ``path`` when it was read.
    """

    name: str
    size: int
    sha256: str
    blob: str
    path: Path | None = None
    data: bytes | None = None
    signature: Signature | None = None

    def check_unchanged(self) -> None:
        """Raise InputError if the file is no longer the one that was hashed."""
        if self.path is not None and _signature(self.path) != self.signature:
            raise InputError(
                f"{self.path} was changed while it was being read or sent; nothing was committed",
                "let no other program touch the directory, then run again",
            )


def list_files(directory: Path) -> tuple[dict[str, Path], list[str]]:
    """The files below ``directory`` by their relative names, and the hidden ones left out.

    Raises:
        InputError: A link that leaves the directory, a link to a directory, no regular file, or
            a name that cannot be one on the Hub.
    """
    root = directory.resolve()
    found: dict[str, Path] = {}
    hidden: list[str] = []
    for folder, names, files in os.walk(directory, followlinks=False):
        here = Path(folder)
        for name in sorted(names + files):
            path = here / name
            relative = path.relative_to(directory).as_posix()
            if name.startswith("."):
                hidden.append(relative)
                continue
            _check_entry(path, relative, root)
            if path.is_file():
                found[relative] = path
        names[:] = sorted(name for name in names if not name.startswith("."))
    return dict(sorted(found.items())), hidden


def _check_entry(path: Path, relative: str, root: Path) -> None:
    if not relative.isprintable() or "\\" in relative:
        raise InputError(f"{relative!r} in {root} is no name for a file on the Hub", "rename it")
    if path.is_symlink():
        target = path.resolve()
        if not target.is_relative_to(root):
            raise InputError(f"{path} is a link out of the directory, to {target}", _COPY)
        if not target.is_file():
            raise InputError(f"{path} is a link to {target}, which is no file", _COPY)
    elif not path.is_dir() and not path.is_file():
        raise InputError(f"{path} is no regular file", "remove it from the directory")


def hash_file(name: str, path: Path, progress: Callable[[int], None]) -> PushFile:
    """Read a file once and name it by both of its digests.

    Args:
        name: Its path in the repository.
        path: The file.
        progress: Called with the bytes of each block read.

    Raises:
        InputError: It changed while it was read, or cannot be read.
    """
    try:
        signature = _signature(path)
        size = signature[1]
        sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
        done = 0
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                sha256.update(block)
                if size <= _BLOB_LIMIT:
                    blob.update(block)
                done += len(block)
                progress(len(block))
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}", "check its permissions"
        ) from error
    short = blob.hexdigest() if size <= _BLOB_LIMIT else ""
    hashed = PushFile(name, done, sha256.hexdigest(), short, path=path, signature=signature)
    hashed.check_unchanged()
    return hashed


def in_memory(name: str, data: bytes) -> PushFile:
    """A file of ``data``."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return PushFile(name, len(data), hashlib.sha256(data).hexdigest(), blob, data=data)


def _signature(path: Path) -> Signature:
    try:
        stat = path.stat()
    except OSError:
        return (0, -1, 0)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
