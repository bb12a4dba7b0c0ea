"""An output in a bucket: made in a local directory first, then brought there."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma_convert.console import command_line, progress
from gemma_convert.convert.bucket.objects import GS, Objects, parse_bucket_path
from gemma_convert.convert.bucket.write import check_bucket, upload_directory
from gemma_convert.convert.digests import sha256_of
from gemma_convert.convert.errors import InputError, OutputError
from gemma_convert.convert.job import Job
from gemma_convert.convert.ledger import LEDGER_NAME, input_entries, versions
from gemma_convert.convert.readers.remote import remote_path
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


def check_to_bucket(url: str, *, force: bool) -> None:
    """Refuse a target in a bucket before any work; see `check_bucket`."""
    check_bucket(Objects(), parse_bucket_path(url), force=force)


def run_to_bucket(
    job: Job,
    url: str,
    convert: Callable[[Path], dict[str, Any]],
    *,
    force: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Make an output in the staging directory, upload it, and remove it here.

    An upload that was interrupted goes on without converting again: what the same command made of
    the same inputs is still there.

    Args:
        job: What is made.
        url: Where it goes.
        convert: Makes it in a local directory and returns its ledger.
        force: Whether what is at the target may be replaced.
        quiet: Whether to show no progress.

    Raises:
        OutputError: The target is not empty, or differs from what was made in the end.
        RemoteError: The storage refuses or cannot be reached.
    """
    objects, path = Objects(), parse_bucket_path(url)
    check_bucket(objects, path, force=force)
    local = staging_directory(url)
    ledger = _made_before(local, job) or convert(local)
    ledger["output"]["path"] = url
    text = json.dumps(ledger, indent=2, allow_nan=False) + "\n"
    written = local.with_name(f"{local.name}.{LEDGER_NAME}")
    written.write_text(text, encoding="utf-8")
    written.replace(local / LEDGER_NAME)
    total = sum(entry.stat().st_size for entry in local.rglob("*") if entry.is_file())
    try:
        with progress("uploading", total, quiet=quiet) as advance:
            upload_directory(objects, local, path, progress=advance)
    except KeyboardInterrupt as error:
        error.add_note(f"what was made is kept in {local}; {AGAIN}")
        raise
    _remove(local)
    return ledger


def _remove(local: Path) -> None:
    """Remove a directory so that a kill leaves nothing of it that `_made_before` takes for it."""
    uploaded = local.with_name(f"{local.name}.uploaded")
    shutil.rmtree(uploaded, ignore_errors=True)  # left by a kill
    local.rename(uploaded)
    shutil.rmtree(uploaded)


def staging_directory(url: str) -> Path:
    """Where an output for ``url`` is made: the same directory each time."""
    root = os.environ.get(STAGING_VARIABLE) or Path.home() / ".cache" / "gemma-convert" / "staging"
    name = url.rpartition("/")[2]
    return Path(root) / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def _made_before(local: Path, job: Job) -> dict[str, Any] | None:
    """The ledger of what this very command left here, complete but not yet in the bucket."""
    path = local / LEDGER_NAME
    if not path.is_file():
        return None
    ledger: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    same = (
        ledger.get("command") == shlex.join(command_line())
        and ledger.get("inputs") == input_entries(job)
        and ledger.get("versions") == versions()
        and all(_copied(ledger, name, path) for name, path in job.plan.target.files.items())
    )
    return ledger if same else None


def _copied(ledger: Mapping[str, Any], name: str, path: Path) -> bool:
    """Whether a side file, if the output has it, is still what was copied there."""
    entry = ledger["output"]["files"].get(name)
    return entry is None or entry["sha256"] == sha256_of(path)
