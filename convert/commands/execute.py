"""What every writing command does once its job is planned: show, check, write, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from gemma_convert.console import command_line, progress
from gemma_convert.convert.commands.engine_options import LOCAL, check_engine, engine_of
from gemma_convert.convert.commands.options import WriteOptions
from gemma_convert.convert.commands.planned import hand_over
from gemma_convert.convert.commands.push_directory import check_push, push_output
from gemma_convert.convert.commands.push_options import PushOptions
from gemma_convert.convert.commands.report import show_ledger, show_notes, show_plan
from gemma_convert.convert.commands.to_bucket import (
    bucket_url,
    check_to_bucket,
    run_to_bucket,
    staging_directory,
)
from gemma_convert.convert.job import Job
from gemma_convert.convert.layouts import HF
from gemma_convert.convert.printable import one_line
from gemma_convert.convert.run import Check, check_run, identify, run
from gemma_convert.convert.writers.journal import Journal

_Advance = Callable[[int], None]
Writer = Callable[[Path, _Advance], dict[str, str]]
"""Writes into an empty directory, telling bytes; returns file names with their sha256, if known."""


def execute(
    job: Job,
    options: WriteOptions,
    inputs: Sequence[Path],
    writer: Writer | None = None,
    push: PushOptions | None = None,
    check: Check | None = None,
    engine: str = LOCAL,
) -> None:
    """Carry out ``job``, or with ``--dry-run`` show what it would do.

    Args:
        job: What to do.
        options: Where and how.
        inputs: The paths of the inputs as the user gave them; the output must lie outside.
        writer: How to write and verify it; by default as a model of the job's layout.
        push: Where to push the output, if anywhere.
        check: Judges the output before it takes its name.
        engine: Who writes the shards of a Hugging Face output.

    Raises:
        OutputError: If the output must not be written or what was written reads back wrong.
    """
    settings = {"max_shard_size": options.max_shard_size}
    if hand_over(job, settings):
        return
    url = bucket_url(options.out, inputs)
    check_engine(engine, url, inputs, shards=writer is None and job.layout is HF)
    if not options.quiet:
        show_notes(job)
    if push is not None and url is not None:
        raise click.UsageError("--push-to-hub pushes a local --out")
    if push is not None:  # hours of work must not end at a wrong name
        check_push(push)
    if options.dry_run:
        if url is not None:
            check_to_bucket(url, identify(job, command_line(), settings), force=options.force)
        out, force = (staging_directory(url), True) if url else (options.out, options.force)
        check_run(job, out, force=force, inputs=inputs)
        show_plan(job, as_json=options.as_json)
        return

    def write(directory: Path, journal: Journal) -> dict[str, str]:
        # every tensor is written, then read back
        with progress("converting", 2 * job.plan.target.nbytes, quiet=options.quiet) as advance:
            if writer is not None:
                return writer(directory, advance)
            if job.layout is HF:
                return _write_hf(job, directory, options.max_shard_size, advance, journal, engine)
            return _write_orbax(job, directory, advance, journal)

    def tell(note: str) -> None:
        if not options.quiet:
            click.echo(f"note: {one_line(note)}", err=True)

    def make(out: Path, *, force: bool = True) -> dict[str, Any]:
        return run(
            job,
            out,
            write,
            force=force,
            command=command_line(),
            inputs=inputs,
            allow_unchanged=options.allow_unchanged,
            settings=settings,
            tell=tell,
            check=check,
        )

    if url is not None:
        identity = identify(job, command_line(), settings)
        ledger = run_to_bucket(
            url, make, identity, force=options.force, quiet=options.quiet, tell=tell
        )
    else:
        ledger = make(options.out, force=options.force)
    if options.as_json or not options.quiet:
        show_ledger(ledger, as_json=options.as_json)
    if push is not None:
        push_output(options.out, push, quiet=options.quiet or options.as_json)


def _write_hf(
    job: Job,
    directory: Path,
    shard_bytes: int,
    advance: _Advance,
    journal: Journal,
    engine: str,
) -> dict[str, str]:
    from gemma_convert.convert.writers.hf import write_hf

    files = write_hf(
        job.plan.target,
        directory,
        max_shard_bytes=shard_bytes,
        progress=advance,
        journal=journal,
        engine=engine_of(engine, journal),
    )
    return {file.name: file.sha256 for file in files}


def _write_orbax(job: Job, directory: Path, advance: _Advance, journal: Journal) -> dict[str, str]:
    from gemma_convert.convert.writers.orbax import write_verified
    from gemma_convert.convert.writers.orbax_tree import form_of

    # Orbax starts jax's backend to write; it must not take an accelerator for that.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    form = form_of(job.layout, job.plan.target)
    write_verified(job.plan.target, directory, form=form, progress=advance, journal=journal)
    return {}
