"""``gemma-convert orbax-to-hf``: the main job."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from gemma_convert.console import command_line
from gemma_convert.convert.commands.options import (
    WriteOptions,
    alpha_option,
    base_option,
    step_option,
    write_options,
)


def _checks(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    from gemma_convert.convert.validation.gate import CHECKS

    chosen = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in chosen:
        if name not in CHECKS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(CHECKS)}")
    return chosen


@click.command("orbax-to-hf")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@base_option
@alpha_option
@step_option
@click.option(
    "--validate",
    callback=_checks,
    help="Checks that the output must pass before it takes its name: roundtrip, merged, logits, "
    "with commas between them. One that fails is left as OUT.rejected, with a report.",
)
@write_options
def command(
    checkpoint: Path,
    base: Path | None,
    alpha: float | None,
    step: int | None,
    validate: tuple[str, ...],
    options: WriteOptions,
) -> None:
    """Turn an Orbax CHECKPOINT of Tunix or DeepMind's library into a Hugging Face directory.

    LoRA factors of Qwix are merged: into the base, or into the checkpoint's own weights where it
    has them. Config, tokenizer and templates come from the base.

    \b
    Example:
      gemma-convert orbax-to-hf runs/sft/1244 --base gemma-3-270m/ --out merged/ --alpha 16
    """
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.jobs import orbax_to_hf
    from gemma_convert.convert.readers import open_base, open_checkpoint

    if base is None:
        raise click.UsageError("Missing option '--base'.")
    source, reference = open_checkpoint(checkpoint, step), open_base(base)
    job = orbax_to_hf(
        source,
        reference,
        alpha=alpha,
        dtype=from_config(options.dtype) if options.dtype else None,
    )

    def tell(text: str) -> None:
        if not options.quiet:
            click.echo(text, err=True)

    check = None
    if validate and not options.dry_run:
        from gemma_convert.convert.validation.gate import Gate

        if "merged" in validate and job.adapter is None:
            raise click.UsageError("--validate merged: the checkpoint holds no LoRA factors")
        gate = Gate(validate, source, reference, checkpoint, base, alpha, step)
        check = partial(
            gate.refuse_unless_right, out=options.out, command=command_line(), tell=tell
        )
    execute(job, options, inputs=(checkpoint, base), check=check)
