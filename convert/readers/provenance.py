"""What an earlier run of ours left beside a checkpoint: its ledger, ``conversion.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import read_object

LEDGER_NAME = "conversion.json"


def with_provenance(checkpoint: Checkpoint, *directories: Path) -> Checkpoint:
    """``checkpoint`` with the adapters that are merged into it already, under ``merged``.

    Args:
        checkpoint: As opened.
        directories: Where its ledger may lie, the nearest first. A file of that name that is no
            ledger of ours says nothing.
    """
    path = next((d / LEDGER_NAME for d in directories if (d / LEDGER_NAME).is_file()), None)
    if path is None:
        return checkpoint
    try:
        found = read_object(path).get("merged")
    except InputError:
        return checkpoint
    merged = [entry for entry in found if _is_entry(entry)] if isinstance(found, list) else []
    return checkpoint.replace(metadata={**checkpoint.metadata, "merged": merged})


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("factors_sha256"), str)
