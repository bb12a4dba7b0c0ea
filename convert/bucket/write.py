"""Bring a finished local directory into a bucket so that it appears there whole.

Object stores have no rename. So everything is uploaded under a prefix beside the final one,
``PREFIX.partial/``, and compared there; only then it is copied inside the storage, the files that
make a directory loadable last (index, config, Orbax's ``commit_success.txt``). An interrupted
upload leaves nothing under the final prefix; an interrupted copy, seconds for the largest model,
leaves something that no library takes for a checkpoint. Run again, both go on where they ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from gemma_convert.convert.bucket.objects import BucketPath, ObjectInfo, Objects
from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.ledger import LEDGER_NAME
from gemma_convert.convert.readers.orbax_metadata import OCDBT_MANIFEST
from gemma_convert.convert.readers.orbax_steps import COMMIT_FILE, STEP_FILE, TREE_FILE
from gemma_convert.convert.readers.safetensors import CONFIG_NAME
from gemma_convert.convert.readers.skeleton import INDEX_SUFFIX

COPYING = ".gemma-convert-copying"
"""An object beside the uploaded files once all are there: from then on they are copied. It holds
the mark of the run that does."""

_BLOCK_BYTES = 8 << 20
_RANKS = {
    OCDBT_MANIFEST: 1,
    TREE_FILE: 1,
    STEP_FILE: 2,
    CONFIG_NAME: 2,
    LEDGER_NAME: 3,
    COMMIT_FILE: 3,
}


def partial(path: BucketPath) -> BucketPath:
    """The prefix that is uploaded to."""
    return BucketPath(path.bucket, f"{path.prefix}.partial")


def check_bucket(objects: Objects, path: BucketPath, mark: bytes, *, force: bool) -> None:
    """Refuse a target that holds something, unless a copy of this ``mark`` left it or ``force``.

    Raises:
        OutputError: It is the top of a bucket, or not empty.
    """
    if not path.prefix:
        raise OutputError(f"output {path} is a whole bucket", "give a path in it")
    if force or not objects.list(path) or _copying(objects, path) == mark:
        return
    raise OutputError(
        f"output {path} exists and is not empty",
        "choose another --out, or replace it with --force",
    )


def _copying(objects: Objects, path: BucketPath) -> bytes | None:
    """The mark of the run whose copy to ``path`` has begun, if one has."""
    staged = partial(path)
    found = objects.list(staged).get(COPYING)
    if found is None:
        return None
    return objects.read(staged / COPYING, 0, found.size, found.generation)


def upload_directory(
    objects: Objects,
    directory: Path,
    path: BucketPath,
    mark: bytes,
    *,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Make the objects below ``path`` those of ``directory``, and nothing else.

    Args:
        objects: The client.
        directory: A local directory.
        path: A target that `check_bucket` accepts.
        mark: Of the run.
        progress: Called with the bytes of each file that is there.

    Raises:
        OutputError: What is there in the end differs.
        RemoteError: The storage refuses or cannot be reached; run again to go on.
    """
    files = sorted(
        (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()),
        key=lambda name: (_rank(name), name),
    )
    local = {name: (directory / name).stat().st_size for name in files}
    digests = {name: _md5(directory / name) for name in files}

    def same(name: str, found: Mapping[str, ObjectInfo]) -> bool:
        there = found.get(name)
        return there is not None and (there.size, there.md5) == (local[name], digests[name])

    staged = partial(path)
    found = objects.list(staged)
    objects.delete(staged / name for name in found if name not in local and name != COPYING)
    for name in files:
        if not same(name, found):
            objects.upload(directory / name, staged / name)
        progress(local[name])
    found = objects.list(staged)
    _check(staged, [name for name in files if not same(name, found)])
    objects.write(mark, staged / COPYING)
    _copy(objects, staged, path, files, same)
    objects.delete(staged / name for name in [*files, COPYING])


def _copy(
    objects: Objects,
    staged: BucketPath,
    path: BucketPath,
    files: list[str],
    same: Callable[[str, Mapping[str, ObjectInfo]], bool],
) -> None:
    """Copy inside the storage; what an older output needs to be loadable is deleted first."""
    found = objects.list(path)
    wrong = [name for name in found if name not in files or not same(name, found)]
    objects.delete(path / name for name in sorted(wrong, key=_rank, reverse=True))
    for name in files:
        if not same(name, found):
            objects.copy(staged / name, path / name)
    found = objects.list(path)
    _check(path, [name for name in files if not same(name, found)])


def _check(path: BucketPath, wrong: list[str]) -> None:
    if wrong:
        raise OutputError(
            f"{path / wrong[0]}: size or digest differ from the local file's after the upload",
            "let no other program write there, then run again",
        )


def _rank(name: str) -> int:
    """When a file is written: what makes the others loadable comes after them."""
    file = name.rpartition("/")[2]
    return 1 if file.endswith(INDEX_SUFFIX) else _RANKS.get(file, 0)


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
