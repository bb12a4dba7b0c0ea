"""What every writing command does once its job is planned: show, check, write, report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gemma_convert.console import command_line, progress
from gemma_convert.convert.commands.report import show_ledger, show_notes, show_plan
from gemma_convert.convert.jobs import Job
from gemma_convert.convert.run import check_run, run

Writer = Callable[[Path, Callable[[int], None]], dict[str, str]]
"""Writes into a directory, reports each block written and each read back; see `run.Write`."""


def execute(
    job: Job,
    out: Path,
    writer: Writer,
    *,
    inputs: Sequence[Path],
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Carry out ``job``, or with ``dry_run`` show what it would do.

    Args:
        job: What to do.
        out: The directory to be made.
        writer: How to write it.
        inputs: The paths of the inputs as the user gave them; ``out`` must lie outside.
        force: Whether a non-empty ``out`` may be replaced.
        dry_run: Show the plan and write nothing.
        as_json: Print plan or ledger as JSON.
        quiet: Print nothing else.

    Raises:
        OutputError: If ``out`` must not be written or what was written reads back wrong.
    """
    if not quiet:
        show_notes(job)
    if dry_run:
        check_run(job, out, force=force, inputs=inputs)
        show_plan(job, as_json=as_json)
        return

    def write(directory: Path) -> dict[str, str]:
        with progress("converting", 2 * job.plan.target.nbytes, quiet=quiet) as advance:
            return writer(directory, advance)

    ledger = run(job, out, write, force=force, command=command_line(), inputs=inputs)
    if as_json or not quiet:
        show_ledger(ledger, as_json=as_json)
