"""Whether the small files of an output are those that its conversion writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert import hf_config
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.printable import one_line
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.safetensors import CONFIG_NAME
from gemma_convert.convert.validation.configs import (
    ABSENT,
    Differences,
    json_differences,
    model_differences,
)
from gemma_convert.convert.validation.result import Finding
from gemma_convert.convert.writers.hf import main_dtype

_SHOWN = 60
"""Characters of a value in a finding."""


def check_files(out: Checkpoint, target: Checkpoint) -> list[Finding]:
    """Compare config.json and the side files of ``out`` with what ``target`` is written as.

    JSON is compared by its values, every other file by its bytes.

    Args:
        out: The output; nothing is compared unless it is a Hugging Face directory.
        target: What should have been written there.
    """
    if out.format != "safetensors":
        return []
    directory = Path(out.source)
    expected = hf_config.updated(target.config, main_dtype(target.tensors))
    found = _config(directory, expected) if target.config else []
    for name, path in target.files.items():
        found += [Finding(name, text) for text in _side_file(directory / name, path)]
    return found


def _config(directory: Path, expected: Mapping[str, Any]) -> list[Finding]:
    path = directory / CONFIG_NAME
    if not path.is_file():
        return [Finding(CONFIG_NAME, "missing")]
    differences = model_differences(expected, read_object(path))
    return [Finding(CONFIG_NAME, text) for text in _told(differences)]


def _side_file(found: Path, base: Path) -> list[str]:
    if not found.is_file():
        return ["missing; the base has it"]
    one, other = base.read_bytes(), found.read_bytes()
    if one == other:
        return []
    if found.suffix != ".json":
        return [f"not the base's: {len(other)} bytes, expected {len(one)} and other ones"]
    try:
        return _told(json_differences(read_object(base), read_object(found)))
    except InputError as error:
        return [str(error)]


def _told(differences: Differences) -> list[str]:
    return [
        f"{key} is {_value(found)}, expected {_value(expected)}"
        for key, (expected, found) in differences.items()
    ]


def _value(value: Any) -> str:
    return "not there" if value is ABSENT else one_line(repr(value), _SHOWN)
