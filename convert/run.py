"""Run a job: check the output, write it into a fresh directory, keep the ledger beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.jobs import Job
from gemma_convert.convert.ledger import LEDGER_NAME, file_digests, make_ledger
from gemma_convert.convert.writers.directory import check_output, fresh_directory

Write = Callable[[Path], dict[str, str]]
"""Writes a job into an empty directory; returns file names with their sha256 where it knows it."""

Check = Callable[[Path], None]
"""Raises if what lies in the directory must not take its name; it may move it elsewhere."""


def run(
    job: Job,
    out: Path,
    write: Write,
    *,
    force: bool,
    command: list[str],
    inputs: Iterable[Path] = (),
    allow_unchanged: bool = False,
    check: Check | None = None,
) -> dict[str, Any]:
    """Write ``job`` to ``out`` and return the ledger, which is also written there.

    Args:
        job: What to write.
        out: The directory to be made; it appears whole or not at all.
        write: How to write it.
        force: Whether a non-empty ``out`` may be replaced.
        command: The command line, for the ledger.
        inputs: See `check_run`.
        allow_unchanged: Whether LoRA pairs may vanish in the rounding to the stored dtype.
        check: Judges the whole output before it takes its name.

    Raises:
        OutputError: If ``out`` must not be written, what was written reads back wrong, or ``check``
            refuses it.
        AdapterError: If LoRA pairs changed nothing.
    """
    start = time.monotonic()
    check_run(job, out, force=force, inputs=inputs)
    with fresh_directory(out, force=force) as directory:
        digests = write(directory)
        ledger = make_ledger(job, command, time.monotonic() - start)
        if "adapter" in ledger and not allow_unchanged:
            _require_changes(ledger["adapter"])
        ledger["output"] = {"path": str(out), "files": file_digests(directory, digests)}
        text = json.dumps(ledger, indent=2, allow_nan=False) + "\n"
        (directory / LEDGER_NAME).write_text(text, encoding="utf-8")
        if check is not None:
            check(directory)
    return ledger


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
    check_output(out, [*inputs, *read], nbytes, force=force)
