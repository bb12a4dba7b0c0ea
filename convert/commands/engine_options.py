"""``--engine``: who writes the shards of a Hugging Face output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemma_convert.console import command_line

if TYPE_CHECKING:  # needs numpy
    from gemma_convert.convert.writers.engine import Engine
    from gemma_convert.convert.writers.journal import Journal

LOCAL, RAY = "local", "ray"

engine_option = click.option(
    "--engine",
    type=click.Choice([LOCAL, RAY]),
    default=LOCAL,
    show_default=True,
    help="Who writes the shards: this process, or tasks of a Ray cluster (docs/scale.md).",
)


def check_engine(engine: str, url: str | None, inputs: Sequence[Path], *, shards: bool) -> None:
    """Refuse what cannot be written by other machines.

    Args:
        engine: One of the choices.
        url: Where in a bucket the output goes, if it goes to one.
        inputs: The inputs, as the user gave them.
        shards: Whether the output is a Hugging Face directory.

    Raises:
        click.UsageError: If it cannot.
    """
    from gemma_convert.convert.readers.remote import remote_path

    if engine == LOCAL:
        return
    if not shards:
        raise click.UsageError("--engine ray writes Hugging Face directories only")
    for remote in (url, *map(remote_path, inputs)):
        if remote is not None:
            raise click.UsageError(
                f"--engine ray reads and writes files that all machines see, not {remote}"
            )


def engine_of(name: str, journal: Journal) -> Engine:
    """The engine of that name, for the output whose journal that is."""
    from gemma_convert.convert.writers.engine import in_process

    if name == LOCAL or journal.identity is None:
        return in_process
    from gemma_convert.convert.cluster.engine import ray_engine

    return ray_engine(command_line()[1:], journal.identity)
