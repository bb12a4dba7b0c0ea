"""Open the Hugging Face directory that a conversion takes its config and side files from."""

from __future__ import annotations

from pathlib import Path

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.directory import open_checkpoint
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.remote import open_remote
from gemma_convert.convert.readers.safetensors import CONFIG_NAME
from gemma_convert.convert.readers.side_files import WEIGHT_SUFFIXES, side_files


def open_base(path: Path) -> Checkpoint:
    """Open a base model; a directory without any weights gives its config and side files alone.

    Raises:
        InputError: Anything that cannot be read, a lone safetensors file, an Orbax checkpoint.
    """
    if (remote := open_remote(path, base=True)) is not None:
        return remote
    if (path / CONFIG_NAME).is_file() and not _holds_weights(path):
        return Checkpoint(
            tensors={},
            config=read_object(path / CONFIG_NAME),
            files=side_files(path),
            source=str(path),
            format="safetensors",
        )
    checkpoint = open_checkpoint(path)
    if checkpoint.format != "safetensors" or not path.is_dir():
        raise InputError(
            f"{path} is not a Hugging Face model directory",
            "give the directory that holds config.json, tokenizer and safetensors",
        )
    return checkpoint


def _holds_weights(path: Path) -> bool:
    return any(
        child.name.removesuffix(".index.json").endswith(WEIGHT_SUFFIXES) for child in path.iterdir()
    )
