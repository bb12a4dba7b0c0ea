"""``gemma-convert surgery extract-lora``: what a training run changed, as an adapter."""

from __future__ import annotations

from pathlib import Path

import click

from gemma_convert.convert.commands.options import WriteOptions, write_options
from gemma_convert.surgery.commands.adapter_output import (
    energy_option,
    format_option,
    rank_option,
    write_adapter,
)

MAX_RANK = 256
"""Of a pair, where the energy decides and the user says no limit."""


@click.command("extract-lora")
@click.argument("tuned", type=click.Path(path_type=Path))
@click.argument("base", type=click.Path(path_type=Path))
@rank_option
@energy_option
@click.option(
    "--max-rank",
    type=click.IntRange(1),
    show_default=str(MAX_RANK),
    help="With --energy: the largest rank of a pair.",
)
@click.option(
    "--max-error",
    type=click.FloatRange(0),
    default=0.5,
    show_default=True,
    help="A change of which its pair would miss more than this, by norm, is not of low rank.",
)
@click.option("--save-rest", is_flag=True, help="Save whole what is not of low rank.")
@format_option
@click.option("--model", help="Public model of Orbax checkpoints, such as gemma-4-31b.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Hugging Face directory whose config.json describes Orbax checkpoints.",
)
@click.option("--base-id", help="Hub id of the base, for adapter_config.json.")
@write_options
def command(
    tuned: Path,
    base: Path,
    rank: int | None,
    energy: float | None,
    max_rank: int | None,
    max_error: float,
    save_rest: bool,
    form: str | None,
    model: str | None,
    config: Path | None,
    base_id: str | None,
    options: WriteOptions,
) -> None:
    """Write the LoRA adapter that turns BASE into TUNED, two checkpoints in any layouts.

    Every matrix that changed gets a pair by truncated SVD, of one --rank or of the rank that keeps
    the --energy. Norms, embeddings, new tokens and changes of full rank are listed, or with
    --save-rest saved whole (modules_to_save). Factors are float32 unless --dtype says otherwise.

    \b
    Example:
      gemma-convert surgery extract-lora tuned/ gemma-3-270m/ --out adapter/ --energy 0.99
    """
    if (rank is None) == (energy is None):
        raise click.UsageError("Give --rank or --energy.")
    if rank is not None and max_rank is not None:
        raise click.UsageError("--max-rank goes with --energy; --rank gives every pair its own.")
    if save_rest and form == "orbax":
        raise click.UsageError(
            "--save-rest needs --format peft: Qwix has no place for whole modules."
        )

    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.inputs import model_of
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.surgery.extract_lora import Limits, extract_lora

    before, after = open_checkpoint(base), open_checkpoint(tuned)
    reference = open_base(config) if config is not None else before if before.config else after
    limits = Limits(
        rank or max_rank or MAX_RANK, energy, max_error, from_config(options.dtype or "float32")
    )
    made = extract_lora(
        after,
        before,
        model_of(reference, model),
        reference.config,
        limits,
        to_peft=form != "orbax",
        save_rest=save_rest,
        base_id=base_id,
    )
    write_adapter(made, options, (tuned, base, *((config,) if config else ())))
