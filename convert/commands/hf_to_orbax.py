"""``gemma-convert hf-to-orbax``: the way back, by the same rows."""

from __future__ import annotations

from pathlib import Path

import click

from gemma_convert.convert.commands.options import (
    LAYOUT_NAMES,
    WriteOptions,
    computed_dtype_option,
    write_options,
)


@click.command("hf-to-orbax")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    required=True,
    type=click.Choice([name for name in LAYOUT_NAMES if name != "hf"]),
    help="Whose names, axis orders and values to write.",
)
@computed_dtype_option
@write_options
def command(
    directory: Path, layout: str, computed_dtype: str | None, options: WriteOptions
) -> None:
    """Turn a Hugging Face DIRECTORY into an Orbax checkpoint for JAX.

    For tunix the output is a checkpoint root whose step 0 holds the item model_params, as Tunix's
    own CheckpointManager saves it; for deepmind it is a flat tree, as Google publishes them; for
    maxtext step 0 holds the item items, its layers stacked as for scan_layers=true.

    \b
    Example:
      gemma-convert hf-to-orbax gemma-3-270m/ --layout tunix --out gemma-3-270m-tunix/
    """
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.jobs import convert
    from gemma_convert.convert.layouts import LAYOUTS
    from gemma_convert.convert.readers import open_base

    job = convert(
        open_base(directory),
        LAYOUTS[layout],
        dtype=from_config(options.dtype) if options.dtype else None,
        computed_dtype=from_config(computed_dtype) if computed_dtype else None,
    )
    execute(job, options, inputs=(directory,))
