"""Run a job: check the output, write it where it can be resumed, keep the ledger beside it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gemma_convert import __version__
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.digests import sha256_of
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.job import Job
from gemma_convert.convert.ledger import (
    LEDGER_NAME,
    file_digests,
    ledger_text,
    make_ledger,
    versions,
)
from gemma_convert.convert.writers.directory import check_output
from gemma_convert.convert.writers.journal import Journal
from gemma_convert.convert.writers.staging import already_made, staged_bytes, staging

Write = Callable[[Path, Journal], dict[str, str]]
"""Writes a job into a directory, but for what the journal says is finished there; returns file
names with their sha256 where it knows it."""

_NEUTRAL = frozenset({"--quiet", "--json", "--debug", "--force", "--allow-unchanged"})
"""Options that no byte of an output depends on."""

Check = Callable[[Path, Path], None]
"""Judges what lies in the first directory, before it takes the second's name: raises if it must
not, and may move it elsewhere or put files beside what is there."""
_NEUTRAL_VALUED = frozenset({"--engine"})
"""Such options with a value."""


def run(
    job: Job,
    out: Path,
    write: Write,
    *,
    force: bool,
    command: list[str],
    inputs: Iterable[Path] = (),
    allow_unchanged: bool = False,
    settings: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda note: None,
    check: Check | None = None,
) -> dict[str, Any]:
    """Write ``job`` to ``out`` and return the ledger, which is also written there.

    Args:
        job: What to write.
        out: The directory to be made; it appears whole or not at all. What an interrupted run of
            the same job left is taken over.
        write: How to write it.
        force: Whether a non-empty ``out`` may be replaced.
        command: The command line, for the ledger.
        inputs: See `check_run`.
        allow_unchanged: Whether LoRA pairs may vanish in the rounding to the stored dtype.
        settings: What else the bytes of the output depend on, as JSON.
        tell: Told what a user should know about an interrupted run that was found.
        check: Judges the whole output before it takes its name.

    Raises:
        OutputError: If ``out`` must not be written, another run is writing it, what was written
            reads back wrong, or ``check`` refuses it.
        AdapterError: If LoRA pairs changed nothing.
    """
    start = time.monotonic()
    identity = identify(job, command, settings or {})
    if already_made(out, identity, seal=LEDGER_NAME):
        tell(f"an earlier run made {out} and was killed before it could say so")
        found: dict[str, Any] = json.loads((out / LEDGER_NAME).read_text(encoding="utf-8"))
        return found
    check_run(job, out, force=force, inputs=inputs)

    def changed(before: Mapping[str, Any]) -> None:
        tell(f"an interrupted run to {out} is thrown away: {difference(before, identity)}")

    with staging(out, identity, seal=LEDGER_NAME, force=force, changed=changed) as staged:
        directory, journal = staged
        if journal.pieces:
            tell(f"going on where an interrupted run to {out} ended")
        digests = write(directory, journal)
        ledger = make_ledger(job, command, time.monotonic() - start)
        for adapter in ledger.get("adapters", ()) if not allow_unchanged else ():
            _require_changes(adapter)
        _keep(ledger, directory, out, digests)
        if check is not None:
            check(directory, out)
            known = {name: file["sha256"] for name, file in ledger["output"]["files"].items()}
            _keep(ledger, directory, out, known)  # with what the check put beside it
    return ledger


def _keep(ledger: dict[str, Any], directory: Path, out: Path, digests: Mapping[str, str]) -> None:
    """Write the ledger of ``out`` beside the files that it lists."""
    ledger["output"] = {"path": str(out), "files": file_digests(directory, digests)}
    (directory / LEDGER_NAME).write_text(ledger_text(ledger), encoding="utf-8")


def identify(job: Job, command: Iterable[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the bytes of ``job``'s output depend on: two runs of one identity write the same.

    The command's words are part of it, so that no option can be forgotten here.
    """
    plan = job.plan
    tensors = [
        [name, str(tensor.dtype), list(tensor.shape), plan.actions[name]]
        for name, tensor in plan.target.items()
    ]
    return {
        "versions": all_versions(),
        "inputs": {source.source: dict(source.fingerprint) for source in plan.sources},
        "told": {source.source: _told(source) for source in plan.sources},
        "files": {name: sha256_of(path) for name, path in plan.target.files.items()},
        "plan": _digest(job.layout.name, tensors, plan.target.config),
        "command": _telling(command),
        "settings": dict(settings),
    }


def all_versions() -> dict[str, str]:
    """Versions of this package, of Python, and of the packages that touch the numbers."""
    return {"gemma-convert": __version__, **versions()}


def _telling(command: Iterable[str]) -> list[str]:
    """The words of a command line that an output may depend on."""
    words, found = iter(command), []
    for word in words:
        if word in _NEUTRAL_VALUED:
            next(words, None)
        elif word not in _NEUTRAL and word.partition("=")[0] not in _NEUTRAL_VALUED:
            found.append(word)
    return found


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Why an output begun as ``before`` is no beginning of ``now``, in a few words."""
    if before.get("versions") != now["versions"]:
        return "it was made by other versions of this program or its libraries"
    then: Mapping[str, Any] = before.get("inputs", {})
    for source, files in now["inputs"].items():
        if source in then and then[source] != files:
            names = sorted(files.keys() | then[source].keys())
            which = next(name for name in names if files.get(name) != then[source].get(name))
            return f"{source}/{which} has changed since"
        if source in then and before.get("told", {}).get(source) != now["told"][source]:
            return f"what configs and metadata of {source} say has changed since"
    if before.get("command") == now["command"]:
        # A branch of the Hub has another commit, a training has saved another step.
        for old, new in zip(then, now["inputs"], strict=False):
            if old != new:
                return f"what was {old} then is {new} now"
    copied: Mapping[str, Any] = before.get("files", {})
    for name in sorted(copied.keys() | now["files"].keys()):
        if copied.get(name) != now["files"].get(name):
            return f"{name} has changed since"
    return "it was another command"


def _told(source: Checkpoint) -> str:
    """What is said beside the weights, but for what there was to choose from, which may grow."""
    metadata = {k: value for k, value in source.metadata.items() if k not in ("steps", "items")}
    return _digest(source.config, metadata)


def _digest(*described: Any) -> str:
    """Of values as JSON has them."""
    return hashlib.sha256(json.dumps(described, default=dict).encode()).hexdigest()


def _require_changes(adapter: Mapping[str, Any]) -> None:
    lost = adapter["unchanged"]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise AdapterError(
            f"{adapter['source']}: {lost[0]}{more}: the delta vanishes in the rounding to the "
            f"stored dtype ({adapter['pairs_changed']} of {adapter['pairs_found']} pairs change "
            "the weights); nothing was kept",
            "merge with --dtype float32, or accept it with --allow-unchanged",
        )


def check_run(job: Job, out: Path, *, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse ``out`` where writing ``job`` there would cost the user something.

    Args:
        job: What would be written.
        out: Where.
        force: Whether a non-empty ``out`` may be replaced.
        inputs: The paths that the user gave, where they may hold more than what is read, such as
            the root of an Orbax checkpoint.

    Raises:
        OutputError: See `check_output`.
    """
    read = [Path(source.source) for source in job.plan.sources if source.source]
    # What lies in an input may be a link to somewhere else; what is not read is the user's too.
    read += [entry for path in read for entry in path.rglob("*") if entry.is_symlink()]
    nbytes = job.plan.target.nbytes + sum(
        path.stat().st_size for path in job.plan.target.files.values()
    )
    check_output(out, [*inputs, *read], max(0, nbytes - staged_bytes(out)), force=force)
