"""``gemma-convert surgery resize-lora``: an adapter of another rank."""

from __future__ import annotations

from pathlib import Path

import click

from gemma_convert.convert.commands.options import WriteOptions, alpha_option, write_options
from gemma_convert.surgery.commands.adapter_output import (
    config_base_option,
    energy_option,
    format_option,
    rank_option,
    write_adapter,
)


@click.command("resize-lora")
@click.argument("adapter", type=click.Path(path_type=Path))
@rank_option
@energy_option
@format_option
@config_base_option
@alpha_option
@write_options
def command(
    adapter: Path,
    rank: int | None,
    energy: float | None,
    form: str | None,
    base: Path | None,
    alpha: float | None,
    options: WriteOptions,
) -> None:
    """Give the factors of ADAPTER (PEFT, Tunix, MaxText) another rank.

    Its format stays unless --format says another; MaxText's becomes Tunix's, given the --base.
    Ranks go down by the singular values of the product, which is not formed, and up by zeros. What
    the product is multiplied by stays: alpha becomes scale * rank.

    \b
    Example:
      gemma-convert surgery resize-lora adapter/ --rank 8 --out smaller/
    """
    if (rank is None) == (energy is None):
        raise click.UsageError("Give --rank or --energy.")

    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.inputs import model_of
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.surgery.adapters.open import adapter_source
    from gemma_convert.surgery.resize_lora import resize_lora

    reference = open_base(base) if base is not None else None
    made = resize_lora(
        adapter_source(open_checkpoint(adapter)),
        rank=rank,
        share=energy,
        to_peft=form == "peft" if form else None,
        model=model_of(reference, None) if reference is not None else None,
        config=reference.config if reference is not None else None,
        alpha=alpha,
        dtype=from_config(options.dtype) if options.dtype else None,
    )
    write_adapter(made, options, (adapter, *((base,) if base else ())))
