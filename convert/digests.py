"""Digests of whole files."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256_of(path: Path) -> str:
    """sha256 of a file, in hexadecimal, as the Hub names its large files."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
