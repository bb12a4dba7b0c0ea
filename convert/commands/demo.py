"""``gemma-convert demo``: the main job on a tiny model made on the spot."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

import click


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Directory to work in; a new temporary one if left out. It is kept.",
)
def command(out: Path | None) -> None:
    """Convert, merge and check a tiny Gemma 4, offline, in seconds.

    Makes a base with the 31B's architecture (global layers whose value is the key) and an Orbax
    checkpoint with LoRA factors, and runs the commands that you would run, so that you can repeat
    them.

    \b
    Example:
      gemma-convert demo --out demo/
    """
    from gemma_convert.convert.demo import ALPHA, check_merge, make_inputs
    from gemma_convert.convert.errors import GemmaConvertError, OutputError

    directory = out or Path(tempfile.mkdtemp(prefix="gemma-convert-demo-"))
    if directory.exists() and any(directory.iterdir()):
        raise OutputError(f"{directory} is not empty", "choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    click.echo(f"Making a tiny Gemma 4 and a LoRA run in {directory}\n")
    make_inputs(directory)
    base, run, merged, back = (directory / n for n in ("base", "run", "merged", "back"))
    _run("inspect", run)
    merge = ("--base", base, "--out", merged, "--alpha", f"{ALPHA:g}", "--force")
    _run("orbax-to-hf", run, *merge)
    _run("inspect", merged)
    _run("hf-to-orbax", merged, "--layout", "tunix", "--out", back, "--force")
    wrong, compared = check_merge(directory)
    click.echo(
        f"checked: {compared - wrong:,} of {compared:,} merged weights are the value computed "
        "independently in float64, rounded once to bfloat16"
    )
    if wrong:
        raise GemmaConvertError(f"{wrong} merged weights are wrong", "please report this")


def _program() -> str:
    """How the user called this program, so that a line can be pasted."""
    program = Path(sys.argv[0])
    return str(program) if program.name == "gemma-convert" else "python -m gemma_convert"


def _run(*words: str | Path) -> None:
    """Show a command as a user would type it, and run it."""
    from gemma_convert.cli import invoke

    arguments = [str(word) for word in words]
    click.secho(f"$ {_program()} {shlex.join(arguments)}", bold=True)
    invoke(arguments, {})
    click.echo()
