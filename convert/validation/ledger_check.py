"""Whether a ledger tells the truth: of the files beside it, of the tensors, of the adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.job import Job
from gemma_convert.convert.ledger import (
    LEDGER_NAME,
    adapter_entry,
    file_digests,
    model_entry,
    pairs_in,
    tensor_entries,
)
from gemma_convert.convert.printable import one_line
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.validation.configs import same_json
from gemma_convert.convert.validation.recomputed import Recomputed
from gemma_convert.convert.validation.result import REPORT_NAME, VALIDATION_NAME, Finding
from gemma_convert.surgery.delta import Merged

NOT_COMPARED = "its files were not compared"

_ABOUT = (LEDGER_NAME, VALIDATION_NAME, REPORT_NAME)
"""Files that tell of the output; a check may be run, and kept there, at any time."""

_COMPLETE = ("tensors", "counts", "survival_by_tensor")
"""Objects of the ledger that may have no other keys."""

_SHOWN = 80
"""Characters of a value in a finding."""


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
    told = (_ledger(directory) or {}).get("base")
    used = told.get("used") if isinstance(told, Mapping) else None
    ours = job.bases[0] if job.bases is not None else None
    if isinstance(used, str) and used != ours:
        raise InputError(
            f"{directory / LEDGER_NAME}: merged onto {used}, not onto "
            f"{ours or 'the base as it is'}",
            "give the --base-quantization, --tile, --base-dtype and --source of that run",
        )


def check_ledger(
    directory: Path, job: Job, found: Mapping[str, Recomputed]
) -> tuple[list[Finding], tuple[str, ...]]:
    """Compare ``conversion.json`` with the files beside it and with what ``job`` makes.

    All that follows from the inputs and the output is compared. What does not is when and how the
    run was done, the paths of its inputs, what it left out and, of a sample, which pairs changed
    nothing in the blocks that were not looked at.

    Args:
        directory: Where the ledger lies.
        job: What should have made the output.
        found: What was computed again of each merged tensor.

    Returns:
        What disagrees, and a note if there is no ledger.
    """
    ledger = _ledger(directory)
    if ledger is None:
        return [], (f"{directory} has no {LEDGER_NAME}: {NOT_COMPARED}",)
    told = [*_disagreements(ledger, _derived(job, found, ledger))]
    if job.bases is None and ledger.get("base") is not None:
        told.append(f"base is {_text(ledger['base'])}, but none was quantised")
    return [*_files(directory, ledger), *(Finding(LEDGER_NAME, text) for text in told)], ()


def _ledger(directory: Path) -> Mapping[str, Any] | None:
    path = directory / LEDGER_NAME
    return read_object(path) if path.is_file() else None


def _derived(
    job: Job, found: Mapping[str, Recomputed], ledger: Mapping[str, Any]
) -> dict[str, Any]:
    """What the ledger must tell, where it follows from the job and the output."""
    plan = job.plan
    dropped = ledger.get("dropped")
    ours: dict[str, Any] = {
        "bytes": plan.target.nbytes,
        "tensors": tensor_entries(plan),
        "counts": plan.counts | ({"dropped": len(dropped)} if isinstance(dropped, Mapping) else {}),
        "adapters": _adapters(job, found, ledger.get("adapters")),
    }
    ours["merged"] = [
        {key: entry.get(key) for key in ("weight", "factors_sha256")}
        for entry in (*job.merged_before, *ours["adapters"])
    ]
    if job.model is not None:
        ours["model"] = model_entry(job.model)
    if job.bases is not None:
        ours["base"] = {"used": job.bases[0]}
    ours["survival_by_tensor"] = {
        name: {"weights": plan.target[name].size}
        | ({"weights_changed": one.changed} if _is_whole(plan.target[name].size, one) else {})
        for name, one in found.items()
    }
    ours["survival"] = {"weights": sum(plan.target[name].size for name in found)}
    return ours


def _is_whole(size: int, found: Recomputed) -> bool:
    return found.checked == size


def _adapters(job: Job, found: Mapping[str, Recomputed], told: Any) -> list[dict[str, Any]]:
    """The entries of the adapters, but for where they were read."""
    merged = {n: t for n, t in job.plan.target.items() if isinstance(t, Merged) and n in found}
    pairs = {name: pairs_in(tensor) for name, tensor in merged.items()}
    applied = set().union(*pairs.values())
    changed = set().union(*(pairs[name] for name in merged if found[name].changed))
    whole = all(_is_whole(tensor.size, found[name]) for name, tensor in merged.items())
    entries = []
    for i, adapter in enumerate(job.adapters):
        entry = adapter_entry(adapter, applied, changed)
        del entry["source"]
        if not whole:
            entry |= _believed(entry, told[i] if isinstance(told, list) and i < len(told) else None)
        entries.append(entry)
    return entries


def _believed(ours: Mapping[str, Any], told: Any) -> dict[str, Any]:
    """Which pairs changed nothing, as told, where a sample does not say otherwise."""
    unchanged = told.get("unchanged") if isinstance(told, Mapping) else None
    possible = isinstance(unchanged, list) and all(name in ours["unchanged"] for name in unchanged)
    left = unchanged if possible and unchanged is not None else ours["unchanged"]
    return {"unchanged": left, "pairs_changed": ours["pairs_found"] - len(left)}


def _disagreements(told: Any, ours: Any, at: str = "") -> Iterator[str]:
    """Where ``told``, of whatever JSON type, is not ``ours``; it may have more keys."""
    if isinstance(ours, Mapping):
        if not isinstance(told, Mapping):
            yield f"{at} is {_text(told)}, expected an object"
            return
        for key, value in ours.items():
            name = f"{at}.{key}" if at else key
            if key in told:
                yield from _disagreements(told[key], value, name)
            else:
                yield f"{name} is not there, expected {_text(value)}"
        if at in _COMPLETE:
            yield from (
                f"{at}.{_text(key)} is not there in truth" for key in told if key not in ours
            )
    elif isinstance(ours, list) and any(isinstance(item, Mapping) for item in ours):
        if not isinstance(told, list) or len(told) != len(ours):
            count = f"{len(told)} {at}" if isinstance(told, list) else _text(told)
            yield f"tells of {count}, {len(ours)} are given"
            return
        for i, (one, other) in enumerate(zip(told, ours, strict=True)):
            yield from _disagreements(one, other, f"{at}[{i}]")
    elif not same_json(told, ours):
        yield f"{at} is {_text(told)}, expected {_text(ours)}"


def _text(value: Any) -> str:
    return one_line(repr(value), _SHOWN)


def _files(directory: Path, ledger: Mapping[str, Any]) -> list[Finding]:
    output = ledger.get("output")
    listed = output.get("files") if isinstance(output, Mapping) else None
    if not isinstance(listed, Mapping):
        return [Finding(LEDGER_NAME, f"output.files is {_text(listed)}, expected an object")]
    there = file_digests(directory, {})
    told = {n: entry for n, entry in listed.items() if n not in _ABOUT}
    there = {n: entry for n, entry in there.items() if n not in _ABOUT}
    findings = [Finding(name, "in the ledger, but not there") for name in told.keys() - there]
    findings += [Finding(name, "not in the ledger") for name in there.keys() - told]
    for name in sorted(there.keys() & told.keys()):
        if there[name] != told[name]:
            said = _text(told[name])
            findings.append(Finding(name, f"{there[name]} is not what the ledger says, {said}"))
    return sorted(findings, key=lambda finding: finding.where)
