"""What identifies files: digests of all of one, and stamps that cost no reading."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path


def sha256_of(path: Path) -> str:
    """sha256 of a file, in hexadecimal, as the Hub names its large files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(stat: os.stat_result) -> str:
    """When a file was last changed, as it ends a fingerprint.

    By ctime too: programs set mtime back when they copy, and no program sets ctime.
    """
    return f"mtime_ns:{stat.st_mtime_ns} ctime_ns:{stat.st_ctime_ns}"


def unstamped(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """``fingerprint`` without stamps, where the files are copies of what is known better."""
    return {file: text.partition(" mtime_ns:")[0] for file, text in fingerprint.items()}
