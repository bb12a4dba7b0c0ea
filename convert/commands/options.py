"""Options that the writing commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemma_convert.console import ByteSize, output_options

if TYPE_CHECKING:  # reading adapters needs numpy
    from gemma_convert.surgery.adapters.open import Source
    from gemma_convert.surgery.training_base import Choice


@dataclass(frozen=True)
class WriteOptions:
    """What every writing command asks for.

    Attributes:
        out: The directory to be made.
        dtype: Stored dtype as config.json spells it; as in the source if None.
        max_shard_size: Limit of one safetensors file, in bytes.
        force: Whether a non-empty ``out`` may be replaced.
        allow_unchanged: Whether LoRA pairs may vanish in the rounding to the stored dtype.
        dry_run: Show the plan and write nothing.
        as_json: Print plan or ledger as JSON.
        quiet: Print nothing but errors.
    """

    out: Path
    dtype: str | None
    max_shard_size: int
    force: bool
    allow_unchanged: bool
    dry_run: bool
    as_json: bool
    quiet: bool


_OPTIONS = (
    click.option("--dry-run", is_flag=True, help="Show the plan and write nothing."),
    click.option(
        "--allow-unchanged",
        is_flag=True,
        help="Accept LoRA pairs whose delta vanishes in the rounding to the stored dtype.",
    ),
    click.option(
        "--force",
        is_flag=True,
        help="Replace an output directory that is not empty, or merge what is merged already.",
    ),
    click.option(
        "--max-shard-size",
        type=ByteSize(),
        default="5GB",
        show_default=True,
        help="Limit of one safetensors file.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["bfloat16", "float16", "float32"]),
        help="Stored dtype; as in the source if left out.",
    ),
    click.option(
        "--out", required=True, type=click.Path(path_type=Path), help="Directory to be made."
    ),
)


def write_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `WriteOptions`, handed to the command as ``options``."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        names = WriteOptions.__dataclass_fields__
        options = WriteOptions(**{name: kwargs.pop(name) for name in names})
        command(*args, options=options, **kwargs)

    with_output = output_options(wrapped)
    for option in _OPTIONS:
        with_output = option(with_output)
    return with_output


LAYOUT_NAMES = (
    "hf",
    "tunix",
    "tunix-head",
    "deepmind",
    "deepmind-stacked",
    "maxtext",
    "maxtext-unscanned",
)
"""The names of ``layouts.LAYOUTS``, here so that ``--help`` need not import them."""

computed_dtype_option = click.option(
    "--computed-dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Stored dtype of tensors whose values the layouts store differently (MaxText's norms, "
    "embedding, queries); float32 lets them come back exactly. As --dtype if left out.",
)
base_option = click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="Hugging Face directory of the base model: weights, config, tokenizer.",
)
step_option = click.option(
    "--step", type=int, help="Step of a checkpoint root; the newest finished if left out."
)
alpha_option = click.option(
    "--alpha", type=float, help="LoRA alpha, if the checkpoint does not say it."
)
adapter_option = click.option(
    "--adapter",
    "adapters",
    type=click.Path(path_type=Path),
    multiple=True,
    help="An adapter to merge as well: a PEFT directory or a Tunix checkpoint. May be repeated.",
)
weight_option = click.option(
    "--weight",
    "weights",
    type=float,
    multiple=True,
    help="What the deltas of an adapter are multiplied by, one for each in their order; else 1.",
)


def adapter_sources(paths: Sequence[Path], weights: Sequence[float]) -> list[Source]:
    """The adapters of `adapter_option` and `weight_option`, opened.

    Raises:
        click.UsageError: If there are weights, but not one for each adapter.
    """
    from gemma_convert.convert.readers import open_checkpoint
    from gemma_convert.surgery.adapters.open import adapter_source

    if weights and len(weights) != len(paths):
        raise click.UsageError(f"{len(paths)} adapters, but {len(weights)} times --weight.")
    scaled = zip(paths, weights or [1.0] * len(paths), strict=True)
    return [adapter_source(open_checkpoint(path), weight) for path, weight in scaled]


def base_quantization_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--base-quantization`` and what says more of it, as one `Choice` for the command."""

    @wraps(command)
    def wrapped(
        *args: Any,
        base_quantization: str | None,
        tile: int | None,
        base_dtype: str | None,
        **kwargs: Any,
    ) -> None:
        choice = _choice(base_quantization, tile, base_dtype)
        command(*args, base_quantization=choice, **kwargs)

    with_dtype = click.option(
        "--base-dtype",
        type=click.Choice(["bfloat16", "float16", "float32"]),
        help="Dtype that the base had in training, with --base-quantization; as the checkpoint "
        "says if left out, else that of the factors.",
    )(wrapped)
    with_tile = click.option(
        "--tile",
        type=click.IntRange(min=1),
        help="tile_size of the training run, with --base-quantization; none if left out.",
    )(with_dtype)
    return click.option(
        "--base-quantization",
        type=click.Choice(["none", "nf4", "int8", "int4"]),
        help="For adapters of a QLoRA run: merge onto the base quantised as Qwix did for training; "
        "none: onto full precision, also where the checkpoint has quantised weights.",
    )(with_tile)


def _choice(name: str | None, tile: int | None, dtype: str | None) -> Choice:
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.surgery.quantise import Scheme

    if name is not None and name != "none":
        return Scheme(name, tile, from_config(dtype) if dtype else None)
    for option, value in (("--tile", tile), ("--base-dtype", dtype)):
        if value is not None:
            raise click.UsageError(f"{option} wants --base-quantization nf4, int8 or int4.")
    return "none" if name else None
