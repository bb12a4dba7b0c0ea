"""``gemma-convert surgery``: operations on checkpoints, from model to model."""

from __future__ import annotations

import click

from gemma_convert.lazy import LazyGroup

COMMANDS = {
    "merge-lora": "gemma_convert.surgery.commands.merge_lora",
    "extract-lora": "gemma_convert.surgery.commands.extract_lora",
    "resize-lora": "gemma_convert.surgery.commands.resize_lora",
    "combine-lora": "gemma_convert.surgery.commands.combine_lora",
}
"""Command name to the module that has it as ``command``; in the order of ``--help``."""


@click.group("surgery", cls=LazyGroup, commands_at=COMMANDS)
def command() -> None:
    """Change a model or an adapter.

    \b
    Example:
      gemma-convert surgery merge-lora base/ adapter/ --out merged/
    """
