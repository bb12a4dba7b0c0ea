"""``gemma-convert peft-to-orbax``: a PEFT adapter for Tunix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from gemma_convert.convert.commands.options import WriteOptions, base_option, write_options


@click.command("peft-to-orbax")
@click.argument("adapter", type=click.Path(path_type=Path))
@base_option
@click.option("--model", help="Public model instead of --base, such as gemma-4-31b.")
@write_options
def command(adapter: Path, base: Path | None, model: str | None, options: WriteOptions) -> None:
    """Turn a PEFT ADAPTER into an Orbax checkpoint that Tunix restores into a Qwix LoRA model.

    k_proj and v_proj become the fused K/V projection; where their A's differ, ranks are stacked.
    The output's custom metadata holds alpha, and the rules with which Qwix makes such a model.

    \b
    Example:
      gemma-convert peft-to-orbax adapter/ --base gemma-3-270m/ --out runs/imported/
    """
    import os

    from gemma_convert.convert.checkpoint import Checkpoint
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.inputs import model_of
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.convert.writers.journal import Journal
    from gemma_convert.convert.writers.orbax import write_verified
    from gemma_convert.convert.writers.orbax_tree import FORMS
    from gemma_convert.surgery.adapters.open import adapter_source
    from gemma_convert.surgery.exchange import to_qwix

    reference = open_base(base) if base is not None else Checkpoint({}, source=str(adapter))
    made = to_qwix(
        adapter_source(open_checkpoint(adapter)),
        model_of(reference, model),
        dtype=from_config(options.dtype) if options.dtype else None,
    )

    def write(directory: Path, advance: Callable[[int], None]) -> dict[str, str]:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # writing takes no accelerator
        target = made.job.plan.target
        write_verified(
            target,
            directory,
            form=FORMS["tunix"],
            progress=advance,
            journal=Journal(),
            custom_metadata=made.beside,
        )
        return {}

    execute(made.job, options, (adapter, *((base,) if base else ())), write)
