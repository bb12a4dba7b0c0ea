"""``gemma-convert hf-to-orbax``: the way back, by the same rows."""

from __future__ import annotations

from pathlib import Path

import click

from gemma_convert.convert.commands.options import WriteOptions, write_options


@click.command("hf-to-orbax")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    required=True,
    type=click.Choice(["tunix", "deepmind"]),
    help="Whose names and axis orders to write.",
)
@write_options
def command(directory: Path, layout: str, options: WriteOptions) -> None:
    """Turn a Hugging Face DIRECTORY into an Orbax checkpoint for JAX.

    For tunix the output is a checkpoint root whose step 0 holds the item model_params, as Tunix's
    own CheckpointManager saves it; for deepmind it is a flat tree, as Google publishes them.

    \b
    Example:
      gemma-convert hf-to-orbax gemma-3-270m/ --layout tunix --out gemma-3-270m-tunix/
    """
    from gemma_convert.convert.commands.execute import execute
    from gemma_convert.convert.dtypes import from_config
    from gemma_convert.convert.jobs import hf_to_orbax
    from gemma_convert.convert.layouts import LAYOUTS
    from gemma_convert.convert.readers import open_base

    dtype = from_config(options.dtype) if options.dtype else None
    job = hf_to_orbax(open_base(directory), layout=LAYOUTS[layout], dtype=dtype)
    execute(job, options, inputs=(directory,))
