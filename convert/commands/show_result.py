"""Outcomes of checks on a terminal, as JSON and as an HTML report; and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from gemma_convert.console import command_line, print_json
from gemma_convert.convert.validation.result import Result

SHOWN = 20
"""Findings printed of each check; all of them are in the JSON and in the report."""


def finish(
    results: Sequence[Result], *, as_json: bool, quiet: bool, report: Path | None, fails: bool
) -> None:
    """Show ``results``, write the report, and exit 1 if one failed.

    Args:
        results: Of the checks that were run.
        as_json: Print JSON.
        quiet: Print nothing but what is wrong.
        report: Where to write an HTML report, if anywhere.
        fails: Whether a finding makes the command fail.
    """
    if as_json:
        print_json([r.json() for r in results] if len(results) > 1 else results[0].json())
    elif not quiet:
        for result in results:
            _show(result)
    if report is not None:  # last: what was found out is told, whether or not it can be written
        from gemma_convert.convert.validation.report import write_report

        write_report(report, results, command_line())
        if not (as_json or quiet):
            click.echo(f"report: {report}")
    if fails and not all(result.passed for result in results):
        for result in results if quiet and not as_json else ():
            for finding in result.findings[:SHOWN]:
                click.echo(f"{result.check}: {finding}", err=True)
        raise click.exceptions.Exit(1)


def _show(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    table = Table(title=f"{result.check}: {result.title}", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in result.summary:
        table.add_row(*row)
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for finding in result.findings[:SHOWN]:
        console.print(f"  {finding}", soft_wrap=True)
    if len(result.findings) > SHOWN:
        console.print(f"  and {len(result.findings) - SHOWN} more (--json or --report has all)")
    if result.check != "diff":
        count = len(result.findings)
        failed = f"FAILED: {count} finding{'' if count == 1 else 's'}"
        console.print("PASSED" if result.passed else failed)
