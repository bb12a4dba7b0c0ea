"""What every writing command does once its job is planned: show, check, write, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gemma_convert.console import command_line, progress
from gemma_convert.convert.commands.options import WriteOptions
from gemma_convert.convert.commands.report import show_ledger, show_notes, show_plan
from gemma_convert.convert.jobs import Job
from gemma_convert.convert.layouts import HF
from gemma_convert.convert.run import Check, check_run, run

_Advance = Callable[[int], None]


def execute(
    job: Job, options: WriteOptions, inputs: Sequence[Path], check: Check | None = None
) -> None:
    """Carry out ``job``, or with ``--dry-run`` show what it would do.

    Args:
        job: What to do.
        options: Where and how.
        inputs: The paths of the inputs as the user gave them; the output must lie outside.
        check: Judges the output before it takes its name.

    Raises:
        OutputError: If the output must not be written or what was written reads back wrong.
    """
    if not options.quiet:
        show_notes(job)
    if options.dry_run:
        check_run(job, options.out, force=options.force, inputs=inputs)
        show_plan(job, as_json=options.as_json)
        return

    def write(directory: Path) -> dict[str, str]:
        # every tensor is written, then read back
        with progress("converting", 2 * job.plan.target.nbytes, quiet=options.quiet) as advance:
            if job.layout is HF:
                return _write_hf(job, directory, options.max_shard_size, advance)
            return _write_orbax(job, directory, advance)

    ledger = run(
        job,
        options.out,
        write,
        force=options.force,
        command=command_line(),
        inputs=inputs,
        allow_unchanged=options.allow_unchanged,
        check=check,
    )
    if options.as_json or not options.quiet:
        show_ledger(ledger, as_json=options.as_json)


def _write_hf(job: Job, directory: Path, shard_bytes: int, advance: _Advance) -> dict[str, str]:
    from gemma_convert.convert.writers.hf import write_hf

    files = write_hf(job.plan.target, directory, max_shard_bytes=shard_bytes, progress=advance)
    return {file.name: file.sha256 for file in files}


def _write_orbax(job: Job, directory: Path, advance: _Advance) -> dict[str, str]:
    from gemma_convert.convert.writers.orbax import verify_orbax, write_orbax
    from gemma_convert.convert.writers.orbax_tree import FORMS

    # Orbax starts jax's backend to write; it must not take an accelerator for that.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    form = FORMS[job.layout.name]
    write_orbax(job.plan.target, directory, form=form, progress=advance)
    verify_orbax(job.plan.target, directory, form=form, progress=advance)
    return {}
