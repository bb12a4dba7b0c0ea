"""Open safetensors checkpoints: one file, a Hugging Face model directory, a PEFT adapter.

Opening reads headers, the index and the configs, never a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.names import in_natural_order
from gemma_convert.convert.readers.provenance import with_provenance
from gemma_convert.convert.readers.safetensors_header import Header, read_header
from gemma_convert.convert.readers.safetensors_index import (
    SINGLE_NAME,
    Index,
    check_index,
    check_numbering,
    find_index,
    locate,
    read_index,
)
from gemma_convert.convert.readers.safetensors_tensor import SafetensorsTensor
from gemma_convert.convert.readers.side_files import side_files

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_NAME = "adapter_model.safetensors"

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def open_safetensors(path: Path) -> Checkpoint:
    """Open a safetensors file or a directory of them.

    A directory may be a Hugging Face model (with an index, or with one or several files and none)
    or a PEFT adapter. The checkpoint's ``metadata`` holds ``safetensors``, the strings that the
    files carry, and for an adapter ``adapter_config``, its adapter_config.json.

    Raises:
        InputError: Anything that cannot be trusted or read; the message says what to do.
    """
    if not path.is_dir():
        return read_file(path)
    index_path = find_index(path)
    index = read_index(index_path) if index_path else None
    present = tuple(sorted(file.name for file in path.glob("*.safetensors")))
    names = index.shards if index else _unindexed(path, present)
    headers = {name: read_header(path / name) for name in names}
    if index:
        check_index(index, headers)
    config = path / CONFIG_NAME
    checkpoint = with_provenance(_checkpoint(path, headers), path)
    return checkpoint.replace(
        config=read_object(config) if config.exists() else {},
        files=side_files(path),
        metadata={**checkpoint.metadata, **_adapter_config(path, names)},
        notes=_ignored(index, present) if index else (),
    )


def read_file(path: Path) -> Checkpoint:
    """Open one safetensors file by itself: no config and no side files.

    Raises:
        InputError: See `read_header`.
    """
    checkpoint = _checkpoint(path.parent, {path.name: read_header(path)})
    beside = [name for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME) if (path.parent / name).exists()]
    notes = tuple(f"opened one file; give {path.parent} to use the {name} there" for name in beside)
    return checkpoint.replace(source=str(path), notes=notes)


def _checkpoint(directory: Path, headers: Mapping[str, Header]) -> Checkpoint:
    tensors = {
        name: SafetensorsTensor(name, headers[file].entries[name], directory / file, headers[file])
        for name, file in locate(headers).items()
    }
    strings = {key: text for header in headers.values() for key, text in header.metadata.items()}
    return Checkpoint(
        tensors=in_natural_order(tensors),
        source=str(directory),
        format="safetensors",
        metadata={"safetensors": strings},
        fingerprint={file: header.fingerprint for file, header in headers.items()},
    )


def _unindexed(directory: Path, present: tuple[str, ...]) -> tuple[str, ...]:
    """The weight files of a directory that has no index: all of them."""
    if not present:
        pickles = [file.name for pattern in _PICKLES for file in sorted(directory.glob(pattern))]
        if pickles:
            load = "with transformers: from_pretrained(DIR)"
            if pickles[0].startswith("adapter_model"):
                load = "with PEFT: PeftModel.from_pretrained(BASE, DIR)"
            raise InputError(
                f"{directory} holds no safetensors, only {pickles[0]}",
                f"nothing is unpickled here; convert to safetensors {load}, then "
                "save_pretrained(OUT)",
            )
        raise InputError(
            f"{directory} holds no safetensors files", "give the directory with the weights"
        )
    if ADAPTER_NAME in present and len(present) > 1:
        other = next(name for name in present if name != ADAPTER_NAME)
        raise InputError(
            f"{directory} holds an adapter, {ADAPTER_NAME}, and a model, {other}",
            f"move {ADAPTER_NAME} and {ADAPTER_CONFIG_NAME} to a directory of their own",
        )
    check_numbering(directory, present)
    return present


def _adapter_config(directory: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """The adapter's config as an entry of ``metadata``; empty for a model."""
    if ADAPTER_NAME not in names:
        return {}
    path = directory / ADAPTER_CONFIG_NAME
    if not path.exists():
        raise InputError(
            f"{directory} holds {ADAPTER_NAME} but no {ADAPTER_CONFIG_NAME}",
            "without it the scale of the adapter is unknown: download it too",
        )
    return {"adapter_config": read_object(path)}


def _ignored(index: Index, present: tuple[str, ...]) -> tuple[str, ...]:
    """A note for each safetensors file that the index does not name."""
    notes = []
    for name in present:
        if name not in index.shards:
            also = " (transformers would load it instead)" if name == SINGLE_NAME else ""
            notes.append(f"ignored {name}{also}: {index.path.name} does not name it")
    return tuple(notes)
