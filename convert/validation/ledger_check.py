"""Whether the files of an output are those that its ledger tells of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert.ledger import LEDGER_NAME, factors_digest, file_digests
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.validation.result import Finding
from gemma_convert.surgery.adapter import Adapter


def check_ledger(directory: Path, adapter: Adapter) -> tuple[list[Finding], tuple[str, ...]]:
    """Compare ``conversion.json`` with the files beside it and with the adapter.

    Returns:
        What disagrees, and a note if there is no ledger.
    """
    path = directory / LEDGER_NAME
    if not path.is_file():
        return [], (f"{directory} has no {LEDGER_NAME}: its files were not compared",)
    ledger = read_object(path)
    findings = _files(directory, ledger)
    told = ledger.get("adapter")
    if not isinstance(told, Mapping):
        return [*findings, Finding(LEDGER_NAME, "tells of no adapter")], ()
    for key, value in (("alpha", adapter.alpha), ("factors_sha256", factors_digest(adapter))):
        if told.get(key) != value:
            findings.append(
                Finding(LEDGER_NAME, f"{key} is {told.get(key)}, the adapter's {value}")
            )
    found, applied = told.get("pairs_found"), told.get("pairs_applied")
    if not found == applied == len(adapter.pairs):
        text = f"{found} pairs found and {applied} applied, the adapter has {len(adapter.pairs)}"
        findings.append(Finding(LEDGER_NAME, text))
    return findings, ()


def _files(directory: Path, ledger: Mapping[str, Any]) -> list[Finding]:
    output = ledger.get("output")
    listed = output.get("files", {}) if isinstance(output, Mapping) else {}
    there = file_digests(directory, {})
    there.pop(LEDGER_NAME, None)
    findings = [Finding(name, "in the ledger, but not there") for name in listed.keys() - there]
    findings += [Finding(name, "not in the ledger") for name in there.keys() - listed]
    for name in sorted(there.keys() & listed.keys()):
        if there[name] != listed[name]:
            findings.append(
                Finding(name, f"{there[name]} is not what the ledger says, {listed[name]}")
            )
    return sorted(findings, key=lambda finding: finding.where)
