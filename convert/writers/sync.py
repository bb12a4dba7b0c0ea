"""Bringing files, and the names that directories have for them, to the disk itself."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """``fsync`` a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """`sync` everything below ``directory``, files before the directories that name them."""
    for root, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(root) / name)
        sync(Path(root))
