"""What the commands that write an adapter share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemma_convert.convert.commands.options import WriteOptions

if TYPE_CHECKING:  # needs numpy
    from gemma_convert.surgery.exchange import Exchange

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["peft", "orbax"]),
    help="A PEFT directory, or an Orbax checkpoint that Tunix restores.",
)
config_base_option = click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="Hugging Face directory of the base, where formats differ; its config.json is enough.",
)
rank_option = click.option("--rank", type=click.IntRange(1), help="Rank of every pair.")
energy_option = click.option(
    "--energy",
    type=click.FloatRange(0, 1, min_open=True),
    help="Instead of one rank: the share of the sum of squares that each pair keeps, such as 0.99.",
)


def write_adapter(made: Exchange, options: WriteOptions, inputs: Sequence[Path]) -> None:
    """Write an adapter in the format of its names, or with ``--dry-run`` show what it would be."""
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.layouts import HF

    writer = _write_peft if made.job.layout is HF else _write_orbax
    execute(made.job, options, inputs, lambda directory, advance: writer(made, directory, advance))


def _write_peft(made: Exchange, directory: Path, advance: Callable[[int], None]) -> dict[str, str]:
    from gemma_convert.convert.writers.peft import write_peft

    written = write_peft(made.job.plan.target, made.beside, directory, advance)
    return {written.name: written.sha256}


def _write_orbax(made: Exchange, directory: Path, advance: Callable[[int], None]) -> dict[str, str]:
    import os

    from gemma_convert.convert.writers.journal import Journal
    from gemma_convert.convert.writers.orbax import write_verified
    from gemma_convert.convert.writers.orbax_tree import FORMS

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
