"""``gemma-convert surgery combine-lora``: one adapter made of several."""

from __future__ import annotations

from pathlib import Path

import click

from gemma_convert.convert.commands.options import (
    WriteOptions,
    adapter_sources,
    alpha_option,
    weight_option,
    write_options,
)
from gemma_convert.surgery.commands.adapter_output import (
    config_base_option,
    format_option,
    write_adapter,
)


@click.command("combine-lora")
@click.argument("adapters", nargs=-1, required=True, type=click.Path(path_type=Path))
@weight_option
@click.option(
    "--method",
    type=click.Choice(["cat", "svd", "linear", "ties", "dare-linear", "dare-ties"]),
    default="cat",
    show_default=True,
    help="cat is exact, its ranks add up; svd truncates it; the others work on the factors.",
)
@click.option("--rank", type=click.IntRange(1), help="With svd; else the largest of the inputs'.")
@click.option(
    "--density",
    type=click.FloatRange(0, 1, min_open=True),
    help="With ties and dare: the share of the values that is kept.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of what dare drops."
)
@format_option
@config_base_option
@alpha_option
@write_options
def command(
    adapters: tuple[Path, ...],
    weights: tuple[float, ...],
    method: str,
    rank: int | None,
    density: float | None,
    seed: int,
    form: str | None,
    base: Path | None,
    alpha: float | None,
    options: WriteOptions,
) -> None:
    """Combine ADAPTERS of one base (PEFT, Tunix, MaxText) as PEFT's add_weighted_adapter does.

    The scale of each goes into the factors. A module that only some have is made from those. One
    adapter twice is refused without --force, in another format too.

    \b
    Example:
      gemma-convert surgery combine-lora math/ style/ --weight 1 --weight 0.5 --out both/
    """
    if len(adapters) < 2:
        raise click.UsageError("Give two adapters or more.")
    thins = method.startswith(("ties", "dare"))
    if thins != (density is not None):
        raise click.UsageError(f"--density is {'needed' if thins else 'not used'} with {method}.")
    if rank is not None and method != "svd":
        raise click.UsageError(f"--rank is not used with {method}.")

    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.inputs import model_of
    from gemma_convert.convert.readers import open_base
    from gemma_convert.surgery.combine_lora import Recipe, combine_lora

    reference = open_base(base) if base is not None else None
    made = combine_lora(
        adapter_sources(adapters, weights),
        Recipe(method, rank, density or 1.0, seed),
        to_peft=form == "peft" if form else None,
        model=model_of(reference, None) if reference is not None else None,
        config=reference.config if reference is not None else None,
        alpha=alpha,
        dtype=from_config(options.dtype) if options.dtype else None,
        twice=options.force,
    )
    write_adapter(made, options, (*adapters, *((base,) if base else ())))
