"""What is known of a commit on the Hub, kept on this disk: its files, and the headers of weights.

A commit never changes, so whatever one run has read of it serves all later ones, without a
connection too. It lies in the cache of assets (``HF_ASSETS_CACHE``), which the Hub's client has for
other libraries; that nothing can be written there is no error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from gemma_convert.convert.hub.names import HubPath
from gemma_convert.convert.hub.remote_state import RemoteFile
from gemma_convert.convert.readers.skeleton import Fetch

_FILES = "files.json"


class Kept:
    """What is kept of a folder at a commit.

    Args:
        path: The folder; its revision is a commit.
    """

    def __init__(self, path: HubPath) -> None:
        from huggingface_hub import constants

        repo = path.repo.replace("/", "--")
        self._directory = (
            Path(constants.HF_ASSETS_CACHE)
            / "gemma-convert"
            / repo
            / str(path.revision)
            / quote(path.folder or ".", safe="")
        )
        self._fetched: dict[str, bytes] = {}

    def files(self) -> dict[str, RemoteFile] | None:
        """The folder's files, if they are known."""
        try:
            table = json.loads((self._directory / _FILES).read_bytes())
            return {name: RemoteFile(**entry) for name, entry in table.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def keep_files(self, files: Mapping[str, RemoteFile]) -> None:
        """Keep what the folder's files are."""
        table = {name: asdict(file) for name, file in files.items()}
        self._write(_FILES, json.dumps(table).encode())

    def ranges(self, fetch: Fetch) -> Fetch:
        """``fetch``, for ranges that are not kept; see `keep_ranges`."""

        def kept_or_fetched(name: str, start: int, stop: int) -> bytes:
            key = quote(name, safe="") + f".{start}-{stop}"
            with suppress(OSError):
                data = (self._directory / key).read_bytes()
                if len(data) == stop - start:
                    return data
            self._fetched[key] = fetch(name, start, stop)
            return self._fetched[key]

        return kept_or_fetched

    def keep_ranges(self) -> None:
        """Keep what was fetched, now that it has proved to be sound."""
        for key, data in self._fetched.items():
            self._write(key, data)
        self._fetched.clear()

    def _write(self, name: str, data: bytes) -> None:
        temporary = self._directory / f".{uuid4().hex}"
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, self._directory / name)
            return
        with suppress(OSError):
            temporary.unlink()
