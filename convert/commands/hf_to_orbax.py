"""``gemma-convert hf-to-orbax``: the way back, by the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from gemma_convert.console import output_options
from gemma_convert.convert.commands.orbax_to_hf import DTYPES


@click.command("hf-to-orbax")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    required=True,
    type=click.Choice(["tunix"]),
    help="Whose names and axis orders to write.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory to be made.")
@click.option("--dtype", type=DTYPES, help="Stored dtype; as in the source if left out.")
@click.option("--force", is_flag=True, help="Replace an output directory that is not empty.")
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
@output_options
def command(
    directory: Path,
    layout: str,
    out: Path,
    dtype: str | None,
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Turn a Hugging Face DIRECTORY into an Orbax checkpoint that Tunix restores.

    The output is a checkpoint root whose step 0 holds the item model_params, as Tunix's own
    CheckpointManager saves it.

    \b
    Example:
      gemma-convert hf-to-orbax gemma-3-270m/ --layout tunix --out gemma-3-270m-tunix/
    """
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.jobs import hf_to_orbax
    from gemma_convert.convert.readers import open_base
    from gemma_convert.convert.writers.orbax import verify_orbax, write_orbax

    job = hf_to_orbax(open_base(directory), dtype=from_config(dtype) if dtype else None)

    def write(new: Path, advance: Callable[[int], None]) -> dict[str, str]:
        write_orbax(job.plan.target, new, progress=advance)
        verify_orbax(job.plan.target, new, progress=advance)
        return {}

    execute(
        job,
        out,
        write,
        inputs=(directory,),
        force=force,
        dry_run=dry_run,
        as_json=as_json,
        quiet=quiet,
    )
