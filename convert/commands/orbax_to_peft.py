"""``gemma-convert orbax-to-peft``: a Tunix adapter for PEFT and vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from gemma_convert.convert.commands.options import (
    WriteOptions,
    alpha_option,
    step_option,
    write_options,
)


@click.command("orbax-to-peft")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--base",
    required=True,
    type=click.Path(path_type=Path),
    help="Hugging Face directory of the base model; its config.json is enough.",
)
@click.option("--base-id", help="Hub id of the base, for adapter_config.json.")
@click.option("--revision", help="Revision of --base-id.")
@click.option(
    "--bake-scale",
    is_flag=True,
    help="Multiply B by alpha / r, for servers that apply one scale to all modules.",
)
@alpha_option
@step_option
@write_options
def command(
    checkpoint: Path,
    base: Path,
    base_id: str | None,
    revision: str | None,
    bake_scale: bool,
    alpha: float | None,
    step: int | None,
    options: WriteOptions,
) -> None:
    """Turn the LoRA factors of an Orbax CHECKPOINT (Qwix, Tunix) into a PEFT directory.

    The fused K/V projection becomes k_proj and v_proj with the same A. Nothing is rounded.

    \b
    Example:
      gemma-convert orbax-to-peft runs/sft/1244 --base gemma-3-270m/ --out adapter/ --alpha 16
    """
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.inputs import model_of
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.convert.writers.peft import write_peft
    from gemma_convert.surgery.adapters.open import adapter_source
    from gemma_convert.surgery.exchange import to_peft

    reference = open_base(base)
    made = to_peft(
        adapter_source(open_checkpoint(checkpoint, step)),
        model_of(reference, None),
        reference.config,
        alpha=alpha,
        dtype=from_config(options.dtype) if options.dtype else None,
        base_id=base_id,
        revision=revision,
        baked=bake_scale,
    )

    def write(directory: Path, advance: Callable[[int], None]) -> dict[str, str]:
        written = write_peft(made.job.plan.target, made.beside, directory, advance)
        return {written.name: written.sha256}

    execute(made.job, options, (checkpoint, base), write)
