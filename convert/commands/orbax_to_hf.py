"""``gemma-convert orbax-to-hf``: the main job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from gemma_convert.console import ByteSize, output_options

DTYPES = click.Choice(["bfloat16", "float16", "float32"])


@click.command("orbax-to-hf")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--base",
    required=True,
    type=click.Path(path_type=Path),
    help="Hugging Face directory of the base model: weights, config, tokenizer.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory to be made.")
@click.option(
    "--step", type=int, help="Step of a checkpoint root; the newest finished if left out."
)
@click.option("--alpha", type=float, help="LoRA alpha, if the checkpoint does not say it.")
@click.option("--dtype", type=DTYPES, help="Stored dtype; as in the source if left out.")
@click.option(
    "--max-shard-size", type=ByteSize(), default="5GB", show_default=True, help="Limit of one file."
)
@click.option("--force", is_flag=True, help="Replace an output directory that is not empty.")
@click.option("--dry-run", is_flag=True, help="Show the plan and write nothing.")
@output_options
def command(
    checkpoint: Path,
    base: Path,
    out: Path,
    step: int | None,
    alpha: float | None,
    dtype: str | None,
    max_shard_size: int,
    force: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Turn a Tunix/Qwix Orbax CHECKPOINT into a Hugging Face directory.

    LoRA factors are merged: into the base, or into the checkpoint's own weights where it has
    them. Config, tokenizer and templates come from the base.

    \b
    Example:
      gemma-convert orbax-to-hf runs/sft/1244 --base gemma-3-270m/ --out merged/ --alpha 16
    """
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.jobs import orbax_to_hf
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.convert.writers.hf import write_hf

    job = orbax_to_hf(
        open_checkpoint(checkpoint, step),
        open_base(base),
        alpha=alpha,
        dtype=from_config(dtype) if dtype else None,
    )

    def write(directory: Path, advance: Callable[[int], None]) -> dict[str, str]:
        files = write_hf(
            job.plan.target, directory, max_shard_bytes=max_shard_size, progress=advance
        )
        return {file.name: file.sha256 for file in files}

    execute(
        job,
        out,
        write,
        inputs=(checkpoint, base),
        force=force,
        dry_run=dry_run,
        as_json=as_json,
        quiet=quiet,
    )
