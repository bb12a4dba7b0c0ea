"""The job that a command line plans, without carrying it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # needs numpy
    from gemma_convert.convert.job import Job

_KEY = "planned"
Take = Callable[["Job", Mapping[str, Any]], None]


def planned(arguments: Sequence[str]) -> tuple[Job, Mapping[str, Any]]:
    """Plan what a command of the command line would write.

    Args:
        arguments: As typed behind ``gemma-convert``.

    Returns:
        The job, and the settings on which its output depends besides.

    Raises:
        GemmaConvertError: As from the command.
        click.ClickException: If there is no such command or option.
    """
    from gemma_convert.cli import invoke

    found: list[tuple[Job, Mapping[str, Any]]] = []
    invoke(list(arguments), {_KEY: lambda job, settings: found.append((job, settings))})
    return found[0]


def hand_over(job: Job, settings: Mapping[str, Any]) -> bool:
    """Give the job to `planned`, if that is who runs this command; whether it is."""
    take: Take | None = click.get_current_context().find_root().ensure_object(dict).get(_KEY)
    if take is not None:
        take(job, settings)
    return take is not None
