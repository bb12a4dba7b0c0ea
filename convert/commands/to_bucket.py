"""An output in a bucket: made in a local directory first, then brought there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemma_convert.console import progress
from gemma_convert.convert.bucket.objects import GS, Objects, parse_bucket_path
from gemma_convert.convert.bucket.write import check_bucket, upload_directory
from gemma_convert.convert.errors import InputError, OutputError
from gemma_convert.convert.ledger import LEDGER_NAME, file_digests, ledger_text
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.remote import remote_path
from gemma_convert.convert.run import difference
from gemma_convert.convert.writers.lock import LOCK_NAME, locked
from gemma_convert.convert.writers.staging import AGAIN

STAGING_VARIABLE = "GEMMA_CONVERT_STAGING"
"""Environment variable that names the directory for outputs on their way to a bucket."""


def bucket_url(out: Path, inputs: Sequence[Path]) -> str | None:
    """The URL of an output that goes to a bucket; None for a local one.

    Raises:
        InputError: Another URL.
        OutputError: The target is, holds or lies in an input.
    """
    text = str(out)
    url = remote_path(out) if ":/" in text else None
    if url is None:
        return None
    if not url.startswith(GS):
        raise InputError(f"output {url}: only gs:// can be written", "give a local --out")
    ours = str(parse_bucket_path(url))
    for path in inputs:
        theirs = remote_path(path)
        if theirs is None or not theirs.startswith(GS):
            continue
        theirs = str(parse_bucket_path(theirs))
        if f"{ours}/".startswith(f"{theirs}/") or f"{theirs}/".startswith(f"{ours}/"):
            raise OutputError(
                f"output {ours} and input {theirs} are the same directory or one holds the other",
                "choose another --out",
            )
    return ours


def check_to_bucket(url: str, identity: Mapping[str, Any], *, force: bool) -> None:
    """Refuse a target in a bucket before any work; see `check_bucket`."""
    check_bucket(Objects(), parse_bucket_path(url), _mark(identity), force=force)


def run_to_bucket(
    url: str,
    convert: Callable[[Path], dict[str, Any]],
    identity: Mapping[str, Any],
    *,
    force: bool,
    quiet: bool,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Make an output in the staging directory, upload it, and remove it here.

    An upload that was interrupted goes on without converting again: what a run of the same identity
    made is still there.

    Args:
        url: Where it goes.
        convert: Makes it in a local directory, whatever lies there, and returns its ledger.
        identity: What the output depends on; see `identify`.
        force: Whether what is at the target may be replaced.
        quiet: Whether to show no progress.
        tell: Told why what an earlier run made is not used.

    Raises:
        OutputError: The target is not empty, or differs from what was made in the end.
        RemoteError: The storage refuses or cannot be reached.
    """
    objects, path, mark = Objects(), parse_bucket_path(url), _mark(identity)
    local = staging_directory(url)
    record = local.with_name("made.json")
    local.parent.parent.mkdir(parents=True, exist_ok=True)
    with _locked(local.parent):
        check_bucket(objects, path, mark, force=force)
        ledger = _made_before(local, record, json.loads(_text(identity)), tell)
        if ledger is None:
            record.unlink(missing_ok=True)
            ledger = convert(local)
            ledger["output"]["path"] = url
            _write(record, {"identity": identity, "ledger": ledger})
        (local / LEDGER_NAME).write_text(ledger_text(ledger), encoding="utf-8")
        total = sum(entry.stat().st_size for entry in local.rglob("*") if entry.is_file())
        try:
            with progress("uploading", total, quiet=quiet) as advance:
                upload_directory(objects, local, path, mark, progress=advance)
        except KeyboardInterrupt as error:
            error.add_note(f"what was made is kept in {local}; {AGAIN}")
            raise
        record.unlink()  # first: without it nothing of the directory is taken for an output
        shutil.rmtree(local)
    return ledger


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """`locked`, and the directory removed in the end if nothing was left in it."""
    with locked(directory):
        try:
            yield
        finally:
            if [path.name for path in directory.iterdir()] == [LOCK_NAME]:
                shutil.rmtree(directory)


def _mark(identity: Mapping[str, Any]) -> bytes:
    """What tells one's own objects in a bucket from those of another command."""
    return hashlib.sha256(_text(identity).encode()).hexdigest().encode()


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, default=dict)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file that is whole or not there."""
    whole = path.with_name(f"{path.name}.new")
    whole.write_text(_text(value), encoding="utf-8")
    whole.replace(path)


def staging_directory(url: str) -> Path:
    """Where an output for ``url`` is made: the same each time, in a directory of its own."""
    root = os.environ.get(STAGING_VARIABLE) or Path.home() / ".cache" / "gemma-convert" / "staging"
    name = url.rpartition("/")[2]
    return Path(root) / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}" / "output"


def _made_before(
    local: Path, record: Path, identity: Mapping[str, Any], tell: Callable[[str], None]
) -> dict[str, Any] | None:
    """The ledger of what a run of this identity left here, whole but not yet in the bucket."""
    try:
        made = read_object(record) if record.is_file() else {}
    except InputError:
        return None
    if not made:
        return None
    why = "" if made["identity"] == identity else difference(made["identity"], identity)
    ledger: dict[str, Any] = made["ledger"]
    if not why and file_digests(local, {}) != ledger["output"]["files"]:
        why = f"{local} has changed since"
    if why:
        tell(f"what an interrupted run made for {ledger['output']['path']} is thrown away: {why}")
        return None
    return ledger
