"""Paths that are not local: ``hf://org/name@rev``, ``org/name``, ``gs://bucket/path``.

What is read stays lazy where it can: from the Hub the files needed go into its own cache, from a
bucket tensors are read in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemma_convert.convert.bucket.objects import GS
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError, RemoteError
from gemma_convert.convert.hub.names import SCHEME, plain_hub_path

# A shell word that went through pathlib has lost one of the two slashes.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)")


def remote_path(path: str | Path) -> str | None:
    """The URL that ``path`` stands for; None if it is a local path.

    What exists locally is local, whatever it is called.
    """
    text = str(path)
    if found := _URL.fullmatch(text):
        return f"{found[1].lower()}://{found[2]}"
    if plain_hub_path(text) is not None and not Path(path).exists():
        return SCHEME + text
    return None


def open_remote(
    path: str | Path, step: int | None = None, *, base: bool = False, headers_only: bool = False
) -> Checkpoint | None:
    """Open what is not local; its ``source`` names the URL, of the Hub with the commit.

    Args:
        path: A URL, or what `remote_path` takes for one; None is returned for a local path.
        step: Step of an Orbax root.
        base: Whether it is opened as a base; see `open_base`.
        headers_only: Whether no tensor will be read, so that headers are all that is fetched.

    Raises:
        InputError: An unknown scheme, or nothing there that can be read.
        RemoteError: No access, or no connection.
    """
    url = remote_path(path)
    if url is None:
        return None
    if url.startswith(SCHEME):
        from gemma_convert.convert.hub.download import open_hub

        with _perhaps_local(path, url):
            return open_hub(url, step, base=base, headers_only=headers_only)
    if url.startswith(GS):
        from gemma_convert.convert.bucket.read import open_bucket

        return open_bucket(url, step, base=base)
    scheme = url.split("://")[0]
    raise InputError(
        f"{url}: paths of {scheme}:// are not read",
        "copy it to a local disk, or use gs:// or hf://",
    )


@contextmanager
def _perhaps_local(path: str | Path, url: str) -> Iterator[None]:
    """Say of an ``ORG/NAME`` that the Hub does not give that it is no local path either."""
    try:
        yield
    except RemoteError as error:
        if ":" in str(path) or not error.what.startswith(f"{url}: "):
            raise
        what = f"there is no {path} on this disk, and as {error.what}"
        raise type(error)(what, error.remedy) from error
