"""``gemma-convert validate``: roundtrip, merged, logits."""

from __future__ import annotations

from pathlib import Path

import click

from gemma_convert.console import output_options, progress
from gemma_convert.convert.commands.options import alpha_option, base_option

report_option = click.option(
    "--report", type=click.Path(path_type=Path), help="Write a self-contained HTML report."
)
model_option = click.option(
    "--model", help="Public model of checkpoints without a config, such as gemma-4-31b."
)


@click.group("validate")
def command() -> None:
    """Prove that a checkpoint is right: exit 0 if it is, 1 with what is wrong if not.

    \b
    Example:
      gemma-convert validate merged merged/ --base gemma-3-270m/ --adapter runs/sft/1244 --alpha 16
    """


@command.command("roundtrip")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--via", help="Layouts, with commas between them; all others if left out.")
@base_option
@model_option
@report_option
@output_options
def roundtrip(
    source: Path,
    via: str | None,
    base: Path | None,
    model: str | None,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Bring SOURCE through other layouts and back, in memory, and compare every bit.

    \b
    Example:
      gemma-convert validate roundtrip gemma-3-270m/ --via tunix,deepmind
    """
    from gemma_convert.convert.commands.show_result import finish
    from gemma_convert.convert.layouts import LAYOUTS
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.convert.validation.roundtrip import validate_roundtrip

    chosen = [name.strip() for name in via.split(",")] if via else None
    for name in chosen or ():
        if name not in LAYOUTS:
            raise click.UsageError(f"--via {name}: the layouts are {', '.join(LAYOUTS)}")
    opened = open_checkpoint(source)
    total = opened.nbytes * (len(chosen) if chosen else len(LAYOUTS) - 1)
    with progress("round trip", total, quiet=quiet or as_json) as advance:
        result = validate_roundtrip(
            opened,
            chosen,
            base=open_base(base) if base is not None else None,
            model=model,
            progress=advance,
        )
    finish([result], as_json=as_json, quiet=quiet, report=report, fails=True)


@command.command("merged")
@click.argument("out", type=click.Path(path_type=Path))
@base_option
@click.option(
    "--adapter",
    required=True,
    type=click.Path(path_type=Path),
    help="Checkpoint with the LoRA factors.",
)
@alpha_option
@click.option("--all", "every", is_flag=True, help="Compute every weight again, not a sample.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@report_option
@output_options
def merged(
    out: Path,
    base: Path | None,
    adapter: Path,
    alpha: float | None,
    every: bool,
    seed: int,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compute the merge again in float64 and compare OUT with it.

    Every weight must be the rounded sum that docs/numerics.md describes; all other tensors must be
    the base's bytes; the files must be those of the ledger.

    \b
    Example:
      gemma-convert validate merged merged/ --base gemma-3-270m/ --adapter runs/sft/1244 --alpha 16
    """
    from gemma_convert.convert.commands.show_result import finish
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.convert.validation.merged import validate_merged

    opened = open_checkpoint(out)
    with progress("computing again", opened.nbytes, quiet=quiet or as_json) as advance:
        result = validate_merged(
            opened,
            open_checkpoint(adapter),
            open_base(base) if base is not None else None,
            alpha=alpha,
            every=every,
            seed=seed,
            progress=advance,
        )
    finish([result], as_json=as_json, quiet=quiet, report=report, fails=True)
