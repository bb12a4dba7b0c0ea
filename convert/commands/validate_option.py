"""``--validate``: checks that an output must pass before it takes its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemma_convert.console import command_line

if TYPE_CHECKING:  # numpy is not needed for --help
    from gemma_convert.convert.job import Job
    from gemma_convert.convert.validation.gate import Gate
    from gemma_convert.surgery.training_base import Choice


def _checks(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...]:
    from gemma_convert.convert.validation.gate import CHECKS

    chosen = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    for name in chosen:
        if name not in CHECKS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(CHECKS)}")
    return tuple(dict.fromkeys(chosen))


validate_option = click.option(
    "--validate",
    callback=_checks,
    help="Checks that the output must pass before it takes its name: roundtrip, merged, logits, "
    "with commas between them. One that fails is left as OUT.rejected, with a report.",
)


def gate_of(
    checks: tuple[str, ...],
    job: Job,
    source: Path,
    *,
    base: Path | None,
    adapters: Sequence[Path] = (),
    alpha: float | None = None,
    step: int | None = None,
    quantization: Choice = None,
    quiet: bool = False,
) -> Gate | None:
    """The gate for ``checks``, known to be able to run them; None if there are none.

    Args:
        checks: As `validate_option` gives them.
        job: What will be written.
        source: What is converted, as the user named it.
        base: Where config.json comes from, if not from ``source``.
        adapters: What is merged as well.
        alpha: LoRA alpha as given.
        step: As given.
        quantization: How the base is quantised, as given.
        quiet: Whether to tell nothing.

    Raises:
        click.UsageError: If there is nothing to compare a merge with.
        GemmaConvertError: If a check could not be run on the output.
    """
    if not checks:
        return None
    if "merged" in checks and not job.adapters:
        raise click.UsageError("--validate merged: the checkpoint holds no LoRA factors")
    from gemma_convert.convert.validation.engines.choose import Options
    from gemma_convert.convert.validation.gate import Gate
    from gemma_convert.convert.validation.reference import reference

    def tell(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    engine = None
    if "logits" in checks:
        options = Options(base=base, alpha=alpha, step=step)
        requantised = quantization is not None
        engine = reference(job, source, options, adapters, requantised=requantised)
    if base is None and job.plan.sources[0].config:
        base = source
    gate = Gate(checks, job, engine, source, base, command_line(), tell)
    gate.require_runnable()
    return gate
