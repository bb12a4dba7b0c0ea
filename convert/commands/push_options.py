"""Options of the commands that can push what they write to the Hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click


@dataclass(frozen=True)
class PushOptions:
    """Where and how to push to the Hub.

    Attributes:
        repo: ``org/name``.
        public: Whether everyone may see it.
        yes: Whether to replace and delete there without asking.
        base_model: Hub id of the base model, for the card.
        license: Licence, for the card.
    """

    repo: str
    public: bool = False
    yes: bool = False
    base_model: str | None = None
    license: str | None = None


def push_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--push-to-hub``, ``--public`` and ``--yes``, handed on as ``push``."""

    @wraps(command)
    def wrapped(
        *args: Any, push_to_hub: str | None, public: bool, yes: bool, **kwargs: Any
    ) -> None:
        if push_to_hub is None and (public or yes):
            raise click.UsageError("--public and --yes are about --push-to-hub, which is not given")
        push = PushOptions(push_to_hub, public, yes) if push_to_hub is not None else None
        command(*args, push=push, **kwargs)

    for option in (
        click.option("--yes", is_flag=True, help="Replace and delete files there without asking."),
        click.option("--public", is_flag=True, help="Make that repository visible to everyone."),
        click.option("--push-to-hub", metavar="ORG/NAME", help="Push the output; see `push`."),
    ):
        wrapped = option(wrapped)
    return wrapped
