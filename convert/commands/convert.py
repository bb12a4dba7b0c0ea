"""``gemma-convert convert``: any layout to any other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemma_convert.convert.commands.engine_options import engine_option
from gemma_convert.convert.commands.options import (
    LAYOUT_NAMES,
    WriteOptions,
    adapter_option,
    adapter_sources,
    alpha_option,
    base_option,
    base_quantization_options,
    computed_dtype_option,
    step_option,
    weight_option,
    write_options,
)
from gemma_convert.convert.commands.push_options import PushOptions, push_options
from gemma_convert.convert.commands.validate_option import gate_of, validate_option

if TYPE_CHECKING:  # numpy is not needed for --help
    from gemma_convert.surgery.training_base import Choice


@click.command("convert")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    type=click.Choice(LAYOUT_NAMES),
    help="Whose names, axis orders and values to write.",
)
@click.option(
    "--from",
    "layout",
    type=click.Choice(LAYOUT_NAMES),
    help="Layout of SOURCE, if its names do not tell it.",
)
@computed_dtype_option
@base_option
@click.option(
    "--model",
    help="Public model of a source without a config, such as gemma-4-31b or google/gemma-3-1b-it.",
)
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
    source: Path,
    to: str,
    layout: str | None,
    computed_dtype: str | None,
    base: Path | None,
    model: str | None,
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
    """Turn SOURCE, in whatever layout it is, into another layout; LoRA factors are merged.

    The source's layout is told from its names. Dimensions come from a config.json, in the source
    or in --base, or from --model. A Hugging Face output without --base gets the config.json of
    that public model, and no tokenizer.

    \b
    Example:
      gemma-convert convert gemma-4-31b-orbax/ --model gemma-4-31b --to tunix --out tunix/
    """
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.jobs import convert
    from gemma_convert.convert.layouts import LAYOUTS
    from gemma_convert.convert.readers import open_base, open_checkpoint

    job = convert(
        open_checkpoint(source, step),
        LAYOUTS[to],
        base=open_base(base) if base is not None else None,
        model=model,
        alpha=alpha,
        adapters=adapter_sources(adapters, weights),
        allow_unchanged=options.allow_unchanged,
        merge_again=options.force,
        base_quantization=base_quantization,
        dtype=from_config(options.dtype) if options.dtype else None,
        computed_dtype=from_config(computed_dtype) if computed_dtype else None,
        layout=LAYOUTS[layout] if layout else None,
    )
    inputs = (source, *((base,) if base else ()), *adapters)
    check = gate_of(
        validate,
        job,
        source,
        base=base,
        adapters=adapters,
        alpha=alpha,
        step=step,
        quantization=base_quantization,
        quiet=options.quiet,
    )
    execute(job, options, inputs, push=push, check=check, engine=engine)
