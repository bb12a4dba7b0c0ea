"""What an earlier run of ours left beside a checkpoint: its ledger, ``conversion.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.digests import sha256_of
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.typed import ANY_KEY, fits

LEDGER_NAME = "conversion.json"
_OF_FILES = ("same_as", "made_of", "trained_on")
"""What a ledger tells of an adapter; it holds for the tensors that were written with it."""

_NO_TENSORS = "adapter_config.json"
"""People edit it: what is told of the factors stays true."""

_FORM = {
    "tool": str,
    "command": str,
    "created": str,
    "model": {"family": str, "name": (str, type(None))},
    "inputs": [{"path": str, "format": str}],
    "output": {"files": {ANY_KEY: {"sha256": str}}},
    "counts": {ANY_KEY: int},
    "adapters": [
        {
            "ranks": [int],
            "scales": [(int, float)],
            "weight": (int, float),
            "pairs_found": int,
            "pairs_changed": int,
        }
    ],
    "survival": {"relative_error": (int, float)},
    "survival_by_tensor": {},
}
"""What a model card tells of a ledger; see `fits`."""


def with_provenance(checkpoint: Checkpoint, *directories: Path) -> Checkpoint:
    """``checkpoint`` with what its ledger tells of adapters.

    Under ``merged`` those that are merged into it already, under ``same_as`` the digests of those
    that it is in another spelling, under ``made_of`` of those that it was combined from, under
    ``trained_on`` on what base.

    Args:
        checkpoint: As opened.
        directories: Where its ledger may lie, the nearest first. A file of that name that is no
            ledger of ours says nothing.
    """
    path = next((d / LEDGER_NAME for d in directories if (d / LEDGER_NAME).is_file()), None)
    if path is None:
        return checkpoint
    try:
        ledger = read_object(path)
    except InputError:
        return checkpoint
    merged = [entry for entry in _listed(ledger.get("merged")) if _is_entry(entry)]
    told = {key: ledger[key] for key in _OF_FILES if ledger.get(key)}
    told = told if told and _is_of(ledger, path.parent) else {}
    return checkpoint.replace(metadata={**checkpoint.metadata, "merged": merged, **told})


def read_ledger(path: Path) -> dict[str, Any]:
    """A ledger of ours; empty for another file of that name.

    Raises:
        InputError: No JSON object.
    """
    ledger = read_object(path)
    ours = str(ledger.get("tool")).startswith("gemma-convert") and "output" in ledger
    return ledger if ours and fits(ledger, _FORM) else {}


def same_as(table: Mapping[str, Any]) -> tuple[str, ...]:
    """The digests under ``same_as`` and ``made_of``, of a ledger's entry or of metadata."""
    found = (*_listed(table.get("same_as")), *_listed(table.get("made_of")))
    return tuple(digest for digest in found if isinstance(digest, str))


def _is_of(ledger: Mapping[str, Any], directory: Path) -> bool:
    """Whether the tensors are those that the ledger tells of: it stays where others are saved."""
    output = ledger.get("output")
    files = output.get("files") if isinstance(output, Mapping) else None
    return isinstance(files, Mapping) and all(
        _is_file(directory / name, entry) for name, entry in files.items() if name != _NO_TENSORS
    )


def _is_file(path: Path, entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and path.is_file()
        and path.stat().st_size == entry.get("bytes")
        and sha256_of(path) == entry.get("sha256")
    )


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("factors_sha256"), str)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()
