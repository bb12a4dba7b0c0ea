"""``gemma-convert surgery merge-lora``: adapters into a base, in the base's own layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemma_convert.convert.commands.engine_options import engine_option
from gemma_convert.convert.commands.options import (
    WriteOptions,
    adapter_sources,
    alpha_option,
    base_quantization_options,
    weight_option,
    write_options,
)
from gemma_convert.convert.commands.validate_option import gate_of, validate_option

if TYPE_CHECKING:  # numpy is not needed for --help
    from gemma_convert.surgery.training_base import Choice


@click.command("merge-lora")
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("adapters", nargs=-1, required=True, type=click.Path(path_type=Path))
@weight_option
@alpha_option
@base_quantization_options
@click.option("--model", help="Public model of an Orbax base, such as gemma-4-31b.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Hugging Face directory whose config.json describes an Orbax base.",
)
@validate_option
@engine_option
@write_options
def command(
    base: Path,
    adapters: tuple[Path, ...],
    weights: tuple[float, ...],
    alpha: float | None,
    model: str | None,
    config: Path | None,
    base_quantization: Choice,
    validate: tuple[str, ...],
    engine: str,
    options: WriteOptions,
) -> None:
    """Merge ADAPTERS (PEFT directories, Tunix checkpoints) into BASE; the layout stays.

    All deltas of a weight are summed in float32 and rounded once. LoRA, rsLoRA, DoRA, adapters of
    embeddings, heads and experts, and modules saved whole are understood; what is not is refused.

    \b
    Example:
      gemma-convert surgery merge-lora base/ math/ style/ --weight 1 --weight 0.5 --out both/
    """
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.jobs import convert
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.convert.registry import detect

    opened = open_checkpoint(base)
    job = convert(
        opened,
        detect(opened, opened.source).layout,
        base=open_base(config) if config is not None else None,
        model=model,
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
        base,
        base=config,
        adapters=adapters,
        alpha=alpha,
        quantization=base_quantization,
        quiet=options.quiet,
    )
    inputs = (base, *adapters, *((config,) if config else ()))
    execute(job, options, inputs, check=check, engine=engine)
