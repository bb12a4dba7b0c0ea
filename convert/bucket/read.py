"""Open what lies in a bucket: headers and small files are fetched, tensors are read in place."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert.bucket.objects import BucketPath, ObjectInfo, Objects, parse_bucket_path
from gemma_convert.convert.bucket.range_tensor import RangeTensor, Spool
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.digests import unstamped
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.orbax import open_orbax
from gemma_convert.convert.readers.safetensors import CONFIG_NAME
from gemma_convert.convert.readers.safetensors_tensor import SafetensorsTensor
from gemma_convert.convert.readers.skeleton import (
    RemoteEntry,
    is_beside_arrays,
    is_orbax_head,
    is_shard,
    make_skeleton,
    told_as,
)

EMULATOR = "STORAGE_EMULATOR_HOST"


def open_bucket(url: str, step: int | None = None, *, base: bool = False) -> Checkpoint:
    """Open a model directory or an Orbax checkpoint in a bucket; see `open_remote`.

    Side files (tokenizer and the like) lie in a temporary directory until the process ends.

    Raises:
        InputError: Nothing there that can be read.
        RemoteError: No access, or no connection.
    """
    path = parse_bucket_path(url)
    objects = Objects()
    found = objects.list(path)
    if not found:
        raise InputError(f"{path} holds no files", "check the path: give the directory")
    if any(is_shard(name) for name in found) or (base and CONFIG_NAME in found):
        return _open_model(objects, path, found, step, base=base)
    if any(is_orbax_head(name) for name in found):
        return _open_orbax(objects, path, found, step)
    raise InputError(
        f"{path} holds neither safetensors nor an Orbax checkpoint, but "
        + ", ".join(list(found)[:5]),
        "give the directory with the weights",
    )


def _open_model(
    objects: Objects,
    path: BucketPath,
    found: Mapping[str, ObjectInfo],
    step: int | None,
    *,
    base: bool,
) -> Checkpoint:
    from gemma_convert.convert.readers.base import open_base
    from gemma_convert.convert.readers.directory import open_checkpoint

    def fetch(name: str, start: int, stop: int) -> bytes:
        return objects.read(path / name, start, stop, found[name].generation)

    directory = Path(tempfile.mkdtemp(prefix="gemma-convert-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    mirror = directory / "model"
    mirror.mkdir()
    entries = [(name, RemoteEntry(info.size, info.mtime_ns)) for name, info in found.items()]
    with told_as(str(path), mirror):
        make_skeleton(mirror, str(path), entries, fetch)
        opened = open_base(mirror) if base else open_checkpoint(mirror, step)
    spool = Spool(directory)
    tensors = {}
    for name, tensor in opened.items():
        assert isinstance(tensor, SafetensorsTensor)
        file = tensor.path.name
        generation = found[file].generation
        tensors[name] = RangeTensor(tensor, path / file, generation, objects, spool)
    fingerprint = {
        file: f"{text} generation:{found[file].generation}"
        for file, text in unstamped(opened.fingerprint).items()
    }
    return opened.replace(tensors=tensors, source=str(path), fingerprint=fingerprint)


def _open_orbax(
    objects: Objects, path: BucketPath, found: Mapping[str, ObjectInfo], step: int | None
) -> Checkpoint:
    """Find the tree among copies of the files that tell steps and trees; read it in the bucket."""
    with tempfile.TemporaryDirectory(prefix="gemma-convert-") as directory:
        # A checkpoint's own name may tell its step.
        mirror = Path(directory) / (path.prefix.rpartition("/")[2] or path.bucket)
        for name in found:
            _check_name(name, path)
            (mirror / name).parent.mkdir(parents=True, exist_ok=True)
            if is_beside_arrays(name):
                info = found[name]
                data = objects.read(path / name, 0, info.size, info.generation)
                (mirror / name).write_bytes(data)
                os.utime(mirror / name, ns=(info.mtime_ns, info.mtime_ns))

        def kvstore(tree: Path) -> dict[str, Any]:
            below = tree.relative_to(mirror).as_posix()
            at = path if below == "." else path / below
            return {"driver": "gcs", "bucket": at.bucket, "path": f"{at.prefix}/".lstrip("/")}

        _use_emulator()
        with told_as(str(path), mirror):
            opened = open_orbax(mirror, step, kvstore=kvstore)
        tree = Path(opened.source).relative_to(mirror).as_posix()
        source = path if tree == "." else path / tree
        for tensor in opened.values():
            tensor.path = source  # type: ignore[attr-defined]
    notes = tuple(note.replace(str(mirror), str(path)) for note in opened.notes)
    below = "" if tree == "." else f"{tree}/"
    inside = [info for name, info in found.items() if name.startswith(below)]
    fingerprint = unstamped(opened.fingerprint) | {"*": _generations(inside)}
    return opened.replace(source=str(source), notes=notes, fingerprint=fingerprint)


def _generations(objects: Collection[ObjectInfo]) -> str:
    """What identifies all of some objects together."""
    size = sum(info.size for info in objects)
    digest = hashlib.sha256(" ".join(info.generation for info in objects).encode()).hexdigest()
    return f"files:{len(objects)} size:{size} generations:{digest}"


def _check_name(name: str, path: BucketPath) -> None:
    """Refuse the name of an object that, as a file's, would lie somewhere else."""
    if {"", ".", ".."} & set(name.split("/")) or "\0" in name:
        raise InputError(
            f"{path} holds an object called {name!r}, which is no path below it",
            "do not use this checkpoint unless you trust who wrote it; remove the object",
        )


def _use_emulator() -> None:
    """Send tensorstore where gcsfs goes."""
    host = os.environ.get(EMULATOR)
    if host:
        url = host if "://" in host else f"http://{host}"
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", url)
