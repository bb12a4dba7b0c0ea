"""The command line: one group that joins the folders' commands, each loaded when it is called."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import click

from gemma_convert import __version__
from gemma_convert.interrupts import end, interrupted, watch
from gemma_convert.lazy import LazyGroup
from gemma_convert.process import set_up

COMMANDS = {
    "orbax-to-hf": "gemma_convert.convert.commands.orbax_to_hf",
    "hf-to-orbax": "gemma_convert.convert.commands.hf_to_orbax",
    "convert": "gemma_convert.convert.commands.convert",
    "orbax-to-peft": "gemma_convert.convert.commands.orbax_to_peft",
    "peft-to-orbax": "gemma_convert.convert.commands.peft_to_orbax",
    "surgery": "gemma_convert.surgery.commands.group",
    "push": "gemma_convert.convert.commands.push",
    "inspect": "gemma_convert.convert.commands.inspect",
    "diff": "gemma_convert.convert.commands.diff",
    "validate": "gemma_convert.convert.commands.validate",
    "layouts": "gemma_convert.convert.commands.layouts",
    "demo": "gemma_convert.convert.commands.demo",
}
"""Command name to the module that has it as ``command``; in the order of ``--help``."""


@click.group(
    cls=LazyGroup, commands_at=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
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
    except (KeyboardInterrupt, click.Abort) as error:
        return _interrupted(error)
    except Exception as error:
        if interrupted.is_set():  # whatever a library has made of it
            return _interrupted(error)
        if state.get("debug"):
            traceback.print_exc()
        click.echo(f"error: {_one_line(error)}", err=True)
        return 1


def program() -> int:
    """What the shell runs: `main`, ended by SIGTERM as by Ctrl-C, so that it can be resumed."""
    watch()
    set_up()
    return end(main())


def _interrupted(error: BaseException) -> int:
    click.echo("; ".join(("interrupted", *_notes(error))), err=True)
    return 130


def _notes(error: BaseException) -> list[str]:
    """What was said of an interrupt on its way up; click raises another error from it."""
    found: list[str] = getattr(error.__cause__ or error, "__notes__", [])
    return found


def _one_line(error: Exception) -> str:
    from gemma_convert.convert.errors import GemmaConvertError
    from gemma_convert.convert.printable import one_line

    if isinstance(error, OSError) and error.filename and error.strerror:
        return one_line(f"{error.filename}: {error.strerror}; see to the path and its permissions")
    text = one_line(" ".join(str(error).split()))
    if isinstance(error, GemmaConvertError | OSError):
        return text
    return f"{type(error).__name__}: {text} (a bug here; run again with --debug and report it)"
