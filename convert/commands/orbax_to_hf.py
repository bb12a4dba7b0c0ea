"""``gemma-convert orbax-to-hf``: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemma_convert.convert.commands.engine_options import engine_option
from gemma_convert.convert.commands.options import (
    WriteOptions,
    adapter_option,
    adapter_sources,
    alpha_option,
    base_option,
    base_quantization_options,
    step_option,
    weight_option,
    write_options,
)
from gemma_convert.convert.commands.push_options import PushOptions, push_options
from gemma_convert.convert.commands.validate_option import gate_of, validate_option

if TYPE_CHECKING:  # numpy is not needed for --help
    from gemma_convert.surgery.training_base import Choice


@click.command("orbax-to-hf")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@base_option
@alpha_option
@adapter_option
@weight_option
@base_quantization_options
@step_option
@validate_option
@push_options
@engine_option
@write_options
def command(
    checkpoint: Path,
    base: Path | None,
    alpha: float | None,
    adapters: tuple[Path, ...],
    weights: tuple[float, ...],
    step: int | None,
    base_quantization: Choice,
    validate: tuple[str, ...],
    push: PushOptions | None,
    engine: str,
    options: WriteOptions,
) -> None:
    """Turn an Orbax CHECKPOINT of Tunix or DeepMind's library into a Hugging Face directory.

    LoRA factors of Qwix are merged: into the base, or into the checkpoint's own weights where it
    has them. Config, tokenizer and templates come from the base.

    \b
    Example:
      gemma-convert orbax-to-hf runs/sft/1244 --base gemma-3-270m/ --out merged/ --alpha 16
    """
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.jobs import orbax_to_hf
    from gemma_convert.convert.readers import open_base, open_checkpoint

    if base is None:
        raise click.UsageError("Missing option '--base'.")
    job = orbax_to_hf(
        open_checkpoint(checkpoint, step),
        open_base(base),
        alpha=alpha,
        adapters=adapter_sources(adapters, weights),
        allow_unchanged=options.allow_unchanged,
        merge_again=options.force,
        base_quantization=base_quantization,
        dtype=from_config(options.dtype) if options.dtype else None,
    )
    check = gate_of(
        validate,
        job,
        checkpoint,
        base=base,
        adapters=adapters,
        alpha=alpha,
        step=step,
        quantization=base_quantization,
        quiet=options.quiet,
    )
    inputs = (checkpoint, base, *adapters)
    execute(job, options, inputs=inputs, push=push, check=check, engine=engine)
