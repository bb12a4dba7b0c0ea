"""The command line: one group that joins the folders' commands, each loaded when it is called."""

from __future__ import annotations

import signal
import sys
import traceback
from importlib import import_module
from types import FrameType
from typing import Any

import click

from gemma_convert import __version__
from gemma_convert.console import terminated

COMMANDS = {
    "orbax-to-hf": "gemma_convert.convert.commands.orbax_to_hf",
    "hf-to-orbax": "gemma_convert.convert.commands.hf_to_orbax",
    "convert": "gemma_convert.convert.commands.convert",
    "inspect": "gemma_convert.convert.commands.inspect",
    "diff": "gemma_convert.convert.commands.diff",
    "validate": "gemma_convert.convert.commands.validate",
    "layouts": "gemma_convert.convert.commands.layouts",
    "demo": "gemma_convert.convert.commands.demo",
}
"""Command name to the module that has it as ``command``; in the order of ``--help``."""


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, as a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name]).command
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gemma-convert")
@click.pass_context
def group(context: click.Context) -> None:
    """Convert, merge and check Gemma checkpoints between JAX and Hugging Face.

    Try `gemma-convert demo`: the whole main job on a tiny model, offline.
    """
    context.ensure_object(dict)


def invoke(arguments: list[str], state: dict[str, Any]) -> int:
    """Run one command; errors pass through.

    Args:
        arguments: As typed behind ``gemma-convert``.
        state: Filled with what the commands tell each other: ``arguments``, ``debug``.
    """
    state["arguments"] = arguments
    result = group.main(arguments, "gemma-convert", standalone_mode=False, obj=state)
    return result if isinstance(result, int) else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if the promise was kept, 2 for bad usage, 1 for any other error, told in one line.
    """
    state: dict[str, Any] = {}
    try:
        return invoke(sys.argv[1:] if arguments is None else arguments, state)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except Exception as error:
        if state.get("debug"):
            traceback.print_exc()
        click.echo(f"error: {_one_line(error)}", err=True)
        return 1


def program() -> int:
    """What the shell runs: `main`, ended by SIGTERM as by Ctrl-C, so that nothing half is left."""
    signal.signal(signal.SIGTERM, _interrupt)
    return main()


def _interrupt(number: int, frame: FrameType | None) -> None:
    terminated.set()
    raise KeyboardInterrupt


def _one_line(error: Exception) -> str:
    from gemma_convert.convert.errors import GemmaConvertError

    text = " ".join(str(error).split())
    if isinstance(error, GemmaConvertError | OSError):
        return text
    return f"{type(error).__name__}: {text} (a bug here; run again with --debug and report it)"
