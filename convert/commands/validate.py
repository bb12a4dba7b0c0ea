"""``gemma-convert validate``: roundtrip, merged, logits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gemma_convert.console import output_options, progress
from gemma_convert.convert.commands.limit import Limit
from gemma_convert.convert.commands.options import (
    adapter_sources,
    alpha_option,
    base_option,
    base_quantization_options,
    weight_option,
)
from gemma_convert.convert.commands.report_option import report_option

if TYPE_CHECKING:  # numpy is not needed for --help
    from gemma_convert.surgery.training_base import Choice

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
@click.option(
    "--computed-dtype",
    type=click.Choice(["source", "float32", "float64"]),
    default="float64",
    show_default=True,
    help="Dtype meanwhile of tensors whose values the other layout stores differently.",
)
@report_option
@output_options
def roundtrip(
    source: Path,
    via: str | None,
    base: Path | None,
    model: str | None,
    computed_dtype: str,
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
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.layouts import LAYOUTS
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.convert.validation.roundtrip import validate_roundtrip

    chosen = [name.strip() for name in via.split(",")] if via is not None else None
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
            computed_dtype=None if computed_dtype == "source" else from_config(computed_dtype),
            progress=advance,
        )
    finish([result], as_json=as_json, quiet=quiet, report=report, fails=True)


@command.command("merged")
@click.argument("out", type=click.Path(path_type=Path))
@base_option
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    help="What was converted, if that was another checkpoint than the base and the adapters: "
    "weights, or weights and factors.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A Tunix checkpoint or PEFT directory that was merged. May be repeated.",
)
@weight_option
@alpha_option
@base_quantization_options
@model_option
@click.option("--all", "every", is_flag=True, help="Compute every weight again, not a sample.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sample.")
@report_option
@output_options
def merged(
    out: Path,
    base: Path | None,
    source: Path | None,
    adapters: tuple[Path, ...],
    weights: tuple[float, ...],
    alpha: float | None,
    base_quantization: Choice,
    model: str | None,
    every: bool,
    seed: int,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compute the merge again in float64 and compare OUT with it.

    Every weight must be the rounded sum that docs/numerics.md describes; all other tensors must be
    the base's bytes; the files must be those of the ledger.

    Adapters are merged into the base, unless --source has weights of its own; factors in it are
    merged too.

    \b
    Examples:
      gemma-convert validate merged merged/ --base gemma-3-270m/ --adapter runs/sft/1244 --alpha 16
      gemma-convert validate merged both/ --base base/ --adapter math/ --adapter style/ \\
        --weight 1 --weight 0.5
    """
    from gemma_convert.convert.commands.show_result import finish
    from gemma_convert.convert.readers import open_base, open_checkpoint
    from gemma_convert.convert.validation.merged import planned, validate_merged

    if source is None and base is None:
        raise click.UsageError("Missing option '--base' or '--source'.")
    opened, reference = open_checkpoint(out), open_base(base) if base is not None else None
    origin = open_checkpoint(source) if source is not None else reference
    assert origin is not None
    job = planned(
        opened,
        origin,
        reference if source is not None else None,
        model=model,
        alpha=alpha,
        adapters=adapter_sources(adapters, weights),
        base_quantization=base_quantization,
    )
    with progress("computing again", opened.nbytes, quiet=quiet or as_json) as advance:
        result = validate_merged(opened, job, every=every, seed=seed, progress=advance)
    finish([result], as_json=as_json, quiet=quiet, report=report, fails=True)


@command.command("logits")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@base_option
@alpha_option
@click.option("--step", type=int, help="Step of an Orbax root; the newest finished if left out.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON or JSON-lines of prompts.")
@click.option("--layers", is_flag=True, help="Find the first layer from which on they differ.")
@click.option("--dtype-a", type=click.Choice(["float32", "bfloat16"]), help="A computes in this.")
@click.option("--dtype-b", type=click.Choice(["float32", "bfloat16"]), help="B computes in this.")
@click.option("--max-abs", type=Limit(), help="Limit of the largest difference of logits.")
@click.option("--mean-kl", type=Limit(), help="Limit of a prompt's mean KL(A||B), in nats.")
@click.option("--top1", type=Limit(most=1.0), help="Least share of equal favourites, such as 0.98.")
@click.option(
    "--positions",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    help="Positions compared of a long prompt.",
)
@click.option(
    "--low-memory",
    is_flag=True,
    help="Have transformers read each layer from the disk when it is run.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Of a server; of A, if both are servers.")
@click.option("--api-key-b", help="Of B, where both are servers and B is another one.")
@report_option
@output_options
def logits(
    first: str,
    second: str,
    base: Path | None,
    alpha: float | None,
    step: int | None,
    prompts: Path | None,
    layers: bool,
    dtype_a: str | None,
    dtype_b: str | None,
    max_abs: float | None,
    mean_kl: float | None,
    top1: float | None,
    positions: int,
    low_memory: bool,
    api_key: str | None,
    api_key_b: str | None,
    report: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run the same token ids through A and B and compare what they predict.

    Each is a Hugging Face directory (run by transformers), an Orbax checkpoint with or without
    LoRA factors (by Tunix's model; config and tokenizer from --base), a PEFT adapter (onto --base),
    or the address of an OpenAI-compatible server such as vLLM.

    A prompt of --prompts is an object with a name and text, messages or ids.

    \b
    Examples:
      gemma-convert validate logits runs/sft/1244 merged/ --base gemma-3-270m/ --alpha 16 --layers
      gemma-convert validate logits merged/ http://127.0.0.1:8000/v1
    """
    from dataclasses import replace

    from gemma_convert.convert.commands.show_result import finish
    from gemma_convert.convert.validation.engines.choose import Options, key_of_second
    from gemma_convert.convert.validation.setup_logits import Request, compare_logits
    from gemma_convert.convert.validation.verdict import Overrides

    options = Options(base, alpha, dtype_a, step, api_key, low_memory)
    request = Request(
        first,
        second,
        options,
        replace(options, dtype=dtype_b, api_key=key_of_second(first, second, api_key, api_key_b)),
        prompts,
        layers,
        positions,
        Overrides(max_abs, mean_kl, top1),
    )
    result = compare_logits(request, lambda text: None if quiet else click.echo(text, err=True))
    finish([result], as_json=as_json, quiet=quiet, report=report, fails=True)
