"""The objects of a bucket, through gcsfs: list, read by ranges, upload, copy, delete.

``STORAGE_EMULATOR_HOST`` names a server to use instead of Google's, as for Google's own clients.
"""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gemma_convert.convert.errors import GemmaConvertError, InputError, RemoteError

GS = "gs://"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
"""https://cloud.google.com/storage/docs/buckets#naming"""


@dataclass(frozen=True)
class BucketPath:
    """A bucket and a prefix in it, without slashes at its ends; ``str()`` is its URL."""

    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"{GS}{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(self.bucket, f"{self.prefix}/{name}" if self.prefix else name)

    @property
    def key(self) -> str:
        """As gcsfs writes it."""
        return f"{self.bucket}/{self.prefix}"


@dataclass(frozen=True)
class ObjectInfo:
    """An object as a listing tells it.

    Attributes:
        size: Bytes.
        md5: Digest of its content in hexadecimal; empty for a composed object.
        generation: Changes whenever the object is written.
        mtime_ns: When it was written.
    """

    size: int
    md5: str
    generation: str
    mtime_ns: int


def parse_bucket_path(url: str) -> BucketPath:
    """Parse ``gs://bucket/prefix``.

    Raises:
        InputError: No bucket, a name that none can have, or a prefix with ``..`` or empty parts.
    """
    bucket, _, prefix = url.removeprefix(GS).partition("/")
    prefix = prefix.strip("/")
    parts = prefix.split("/") if prefix else []
    if not bucket or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{url!r} is not a path in a bucket", "write it as gs://BUCKET/PATH")
    if _BUCKET.fullmatch(bucket) is None:
        raise InputError(
            f"{url!r}: {bucket!r} cannot be the name of a bucket",
            "it has 3 to 222 of a-z, 0-9, '-', '_' and '.', and a letter or digit at both ends",
        )
    return BucketPath(bucket, prefix)


class Objects:
    """A client; each of its methods raises `RemoteError` or `InputError` in one line."""

    def __init__(self) -> None:
        self._files = _file_system()

    def list(self, path: BucketPath) -> dict[str, ObjectInfo]:
        """The objects below ``path``, by their names relative to it, sorted."""
        with bucket_errors(str(path)):
            found = self._files.find(path.key.rstrip("/"), detail=True, refresh=True)
        start = len(path.key.rstrip("/")) + 1
        listed = {
            name[start:]: _info(about)
            for name, about in found.items()
            if len(name) > start and not name.endswith("/")
        }
        return dict(sorted(listed.items()))

    def read(self, path: BucketPath, start: int, stop: int, generation: str) -> bytes:
        """Bytes ``start`` to ``stop`` of one generation of an object."""
        if start == stop:
            return b""
        with bucket_errors(str(path)):
            data: bytes = self._files.cat_file(path.key, start, stop, generation=generation)
        if len(data) != stop - start:
            raise RemoteError(
                f"{path}: expected {stop - start} bytes from {start} on, found {len(data)}",
                "run again",
            )
        return data

    def upload(self, local: Path, path: BucketPath) -> None:
        """Write a local file as an object, its digest checked on arrival."""
        with bucket_errors(str(path)):
            self._files.put_file(str(local), path.key)

    def write(self, data: bytes, path: BucketPath) -> None:
        """Write a small object."""
        with bucket_errors(str(path)):
            self._files.pipe_file(path.key, data)

    def copy(self, source: BucketPath, target: BucketPath) -> None:
        """Copy an object inside the storage."""
        with bucket_errors(str(target)):
            self._files.cp_file(source.key, target.key)

    def delete(self, paths: Iterable[BucketPath]) -> None:
        """Delete objects."""
        for path in paths:
            with bucket_errors(str(path)):
                self._files.rm_file(path.key)


def _info(about: dict[str, Any]) -> ObjectInfo:
    md5 = base64.b64decode(about.get("md5Hash") or "").hex()
    updated = about["updated"]
    if isinstance(updated, str):
        updated = datetime.fromisoformat(updated)
    nanoseconds = int(updated.timestamp() * 10**6) * 1000
    return ObjectInfo(int(about["size"]), md5, str(about.get("generation", "")), nanoseconds)


def _file_system() -> Any:
    # Its client for hierarchical buckets asks Google over gRPC first; nothing here needs it.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        from gcsfs import GCSFileSystem
    except ImportError as error:
        raise InputError(
            "paths of gs:// need the package gcsfs", "pip install 'gemma-convert[gcs]'"
        ) from error
    # It logs with a traceback what it raises too; the error's one line says it here.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    emulated = {"token": "anon"} if os.environ.get("STORAGE_EMULATOR_HOST") else {}
    with bucket_errors("gs://"):
        return GCSFileSystem(
            consistency="md5", use_listings_cache=False, skip_instance_cache=True, **emulated
        )


@contextmanager
def bucket_errors(what: str) -> Iterator[None]:
    """Turn whatever gcsfs and its libraries raise into one line that begins with ``what``."""
    try:
        yield
    except GemmaConvertError:
        raise
    except Exception as error:
        told = _translated(what, error)
        if told is None:
            raise
        raise told from error


def _translated(what: str, error: Exception) -> GemmaConvertError | None:
    gist = " ".join(str(error).split())[:300] or type(error).__name__
    module = type(error).__module__.partition(".")[0]
    code = str(getattr(error, "code", ""))
    if isinstance(error, FileNotFoundError) or code == "404":
        return InputError(
            f"{what} is not there, or was replaced meanwhile", "check the path, then run again"
        )
    if code in ("401", "403") or isinstance(error, PermissionError) or "Forbidden" in gist:
        return RemoteError(f"{what}: no right to do this ({gist})", "check the account's roles")
    if module == "google":
        return RemoteError(
            f"{what}: no credentials ({gist})", "run `gcloud auth application-default login`"
        )
    if module in ("gcsfs", "aiohttp", "requests") or isinstance(error, OSError | ValueError):
        return RemoteError(f"{what}: the storage cannot be used ({gist})", "run again")
    return None
