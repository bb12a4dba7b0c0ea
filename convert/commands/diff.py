"""``gemma-convert diff``: two checkpoints, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import click

from gemma_convert.console import output_options, progress
from gemma_convert.convert.commands.report_option import report_option


@click.command("diff")
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option("--model", help="Public model of checkpoints without a config, such as gemma-4-31b.")
@click.option(
    "--probes",
    type=click.IntRange(min=0),
    default=72,
    show_default=True,
    help="Singular values sought in each difference, to tell a LoRA and its rank; 0 for none.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print the tensors as CSV.")
@click.option("--exit-code", is_flag=True, help="Exit 1 if anything differs.")
@report_option
@output_options
def command(
    first: Path,
    second: Path,
    model: str | None,
    probes: int,
    as_csv: bool,
    exit_code: bool,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare checkpoints A and B tensor by tensor, in whatever layouts they are.

    Tells what only one of them has, shapes, dtypes, how many values differ and by how much, what
    differs most first, and what the difference looks like: a LoRA and its rank, exchanged tensors,
    moved rows, an offset, a factor.

    \b
    Example:
      gemma-convert diff gemma-3-270m/ merged/
    """
    from gemma_convert.convert.commands.show_result import finish
    from gemma_convert.convert.readers import open_checkpoint
    from gemma_convert.convert.validation import diff as differ

    if as_csv and as_json:
        raise click.UsageError("--json and --csv both print the tensors: give one of them.")
    a, b = open_checkpoint(first), open_checkpoint(second)
    with progress("comparing", a.nbytes, quiet=quiet or as_json or as_csv) as advance:
        result = differ.diff(a, b, model=model, probes=probes, progress=advance)
    if as_csv:
        click.echo(differ.as_csv(result), nl=False)
    finish([result], as_json=as_json, quiet=quiet or as_csv, report=report, fails=exit_code)
