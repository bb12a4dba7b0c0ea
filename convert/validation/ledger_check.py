"""Whether the files of an output are those that its ledger tells of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.job import Job
from gemma_convert.convert.ledger import LEDGER_NAME, file_digests
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.validation.result import VALIDATION_NAME, Finding
from gemma_convert.surgery.adapters.adapter import Adapter, digest

NOT_COMPARED = "its files were not compared"

_ABOUT = (LEDGER_NAME, VALIDATION_NAME)
"""Files that tell of the output; a check may be run, and kept there, at any time."""


def ledger_directory(out: Checkpoint) -> Path:
    """Where the ledger of an output lies: beside its files, or at the root of an Orbax checkpoint.

    Args:
        out: As opened; a step of an Orbax checkpoint names the tree that was read.
    """
    here = Path(out.source)
    above = here.resolve().parents[:2] if out.format == "orbax" else ()
    return next((path for path in (here, *above) if (path / LEDGER_NAME).is_file()), here)


def require_same_base(directory: Path, job: Job) -> None:
    """Refuse to judge a merge onto another version of the base than ``job`` merges onto.

    Raises:
        InputError: If the ledger says that the base was quantised otherwise.
    """
    told = _ledger(directory).get("base")
    used = told.get("used") if isinstance(told, Mapping) else None
    ours = job.bases[0] if job.bases is not None else None
    if used is not None and used != ours:
        raise InputError(
            f"{directory / LEDGER_NAME}: merged onto {used}, not onto "
            f"{ours or 'the base as it is'}",
            "give the --base-quantization, --tile and --source of that run",
        )


def check_ledger(
    directory: Path, adapters: Sequence[Adapter]
) -> tuple[list[Finding], tuple[str, ...]]:
    """Compare ``conversion.json`` with the files beside it and with the adapters.

    Returns:
        What disagrees, and a note if there is no ledger.
    """
    ledger = _ledger(directory)
    if not ledger:
        return [], (f"{directory} has no {LEDGER_NAME}: {NOT_COMPARED}",)
    findings = _files(directory, ledger)
    told = ledger.get("adapters")
    if not isinstance(told, list) or len(told) != len(adapters):
        count = len(told) if isinstance(told, list) else 0
        text = f"tells of {count} adapters, {len(adapters)} are given"
        return [*findings, Finding(LEDGER_NAME, text)], ()
    for entry, adapter in zip(told, adapters, strict=True):
        findings += [Finding(LEDGER_NAME, text) for text in _disagreements(entry, adapter)]
    return findings, ()


def _ledger(directory: Path) -> Mapping[str, Any]:
    path = directory / LEDGER_NAME
    return read_object(path) if path.is_file() else {}


def _disagreements(told: Mapping[str, Any], adapter: Adapter) -> list[str]:
    """What the ledger says otherwise of an adapter."""
    ours = {
        "scales": sorted(set(adapter.scales.values())),
        "weight": adapter.weight,
        "factors_sha256": digest(adapter),
        "replaced": list(adapter.saved),
    }
    wrong = [
        f"{key} is {told.get(key)}, the adapter's {value}"
        for key, value in ours.items()
        if told.get(key) != value
    ]
    found, applied = told.get("pairs_found"), told.get("pairs_applied")
    if not found == applied == len(adapter.pairs):
        wrong.append(
            f"{found} pairs found and {applied} applied, the adapter has {len(adapter.pairs)}"
        )
    return wrong


def _files(directory: Path, ledger: Mapping[str, Any]) -> list[Finding]:
    output = ledger.get("output")
    listed = output.get("files", {}) if isinstance(output, Mapping) else {}
    there = file_digests(directory, {})
    told = {n: entry for n, entry in listed.items() if n not in _ABOUT}
    there = {n: entry for n, entry in there.items() if n not in _ABOUT}
    findings = [Finding(name, "in the ledger, but not there") for name in told.keys() - there]
    findings += [Finding(name, "not in the ledger") for name in there.keys() - told]
    for name in sorted(there.keys() & told.keys()):
        if there[name] != told[name]:
            findings.append(
                Finding(name, f"{there[name]} is not what the ledger says, {told[name]}")
            )
    return sorted(findings, key=lambda finding: finding.where)
