"""Whether a ledger tells the truth: of the files beside it, of the tensors, of the adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.job import Job
from gemma_convert.convert.ledger import (
    LEDGER_NAME,
    adapter_entry,
    file_digests,
    input_entries,
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

_FLOAT32, _NARROW = 1e-5, 1e-3
"""By how much a relative error summed up in float32 may be off: absolutely, since it is that of
small differences between large numbers, and relatively."""


@dataclass(frozen=True)
class Within:
    """A number of which bounds are known."""

    least: float
    most: float

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.least}"
        return f"{self.least:.6g} to {self.most:.6g}"


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
    ledger = _ledger(directory)
    told = None if ledger is None or isinstance(ledger, Finding) else ledger.get("base")
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

    Compared are files, sizes and digests; layouts, model, tensors and their counts; kinds, ranks,
    scales and digests of the adapters; which pairs and how many weights were changed, and how much
    of the delta survived. Of a sample these are compared as far as the blocks that were looked at
    tell. When and how the run was done, paths, and why something was left out do not follow from
    the inputs. Files of other headers than the run's may hold the same values: that is a note.

    Args:
        directory: Where the ledger lies.
        job: What should have made the output.
        found: What was computed again of each merged tensor.

    Returns:
        What disagrees, and notes: that there is no ledger, or that its inputs are others.
    """
    ledger = _ledger(directory)
    if ledger is None:
        return [], (f"{directory} has no {LEDGER_NAME}: {NOT_COMPARED}",)
    if isinstance(ledger, Finding):
        return [ledger], ()
    told = [*_disagreements(ledger, _derived(job, found, ledger))]
    if job.bases is None and ledger.get("base") is not None:
        told.append(f"base is {_text(ledger['base'])}, but none was quantised")
    told += _misshapen(ledger)
    findings = [*_files(directory, ledger), *(Finding(LEDGER_NAME, text) for text in told)]
    return findings, _other_inputs(ledger, job)


def _ledger(directory: Path) -> Mapping[str, Any] | Finding | None:
    """The ledger, what is wrong with one that cannot be read, or None."""
    path = directory / LEDGER_NAME
    try:
        return read_object(path) if path.is_file() else None
    except InputError as error:
        return Finding(LEDGER_NAME, error.what)


def _derived(
    job: Job, found: Mapping[str, Recomputed], ledger: Mapping[str, Any]
) -> dict[str, Any]:
    """What the ledger must tell, where it follows from the job and the output."""
    plan = job.plan
    dropped = ledger.get("dropped")
    ours: dict[str, Any] = {
        **{key: job.details[key] for key in ("layouts",) if key in job.details},
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
    survived = {name: _survived(plan.target[name].size, one) for name, one in found.items()}
    whole = all(_is_whole(plan.target[name].size, one) for name, one in found.items())
    ours["survival_by_tensor"] = survived
    ours["survival"] = {
        "weights": sum(one["weights"] for one in survived.values()),
        "weights_changed": Within(
            sum(one["weights_changed"].least for one in survived.values()),
            sum(one["weights_changed"].most for one in survived.values()),
        ),
        "relative_error": _error(found.values(), whole=whole),
    }
    return ours


def _survived(size: int, found: Recomputed) -> dict[str, Any]:
    """What is left of one tensor's delta, as far as the blocks tell that were computed again."""
    unchanged = found.checked - found.changed
    return {
        "weights": size,
        "weights_changed": Within(found.changed, size - unchanged),
        "relative_error": _error([found], whole=_is_whole(size, found)),
    }


def _error(found: Iterable[Recomputed], *, whole: bool) -> Within:
    """The relative error of all together, which the run has computed in float32."""
    parts = list(found)
    delta = sum(one.delta2 for one in parts)
    exact = float(np.sqrt(sum(one.error2 for one in parts) / delta)) if delta else 0.0
    if not (whole and np.isfinite(exact)):
        return Within(0, np.inf)
    return Within(exact * (1 - _NARROW) - _FLOAT32, exact * (1 + _NARROW) + _FLOAT32)


def _misshapen(ledger: Mapping[str, Any]) -> Iterator[str]:
    """What is not there, or of another form, of what the run alone knows."""
    dropped, notes = ledger.get("dropped"), ledger.get("notes")
    if not isinstance(dropped, Mapping) or not _are_texts(dropped.values()):
        yield f"dropped is {_text(dropped)}, expected an object of names and reasons"
    if not isinstance(notes, list) or not _are_texts(notes):
        yield f"notes is {_text(notes)}, expected a list of texts"
    if _headers(ledger.get("inputs")) is None:
        yield f"inputs is {_text(ledger.get('inputs'))}, expected a list of files and digests"


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _other_inputs(ledger: Mapping[str, Any], job: Job) -> tuple[str, ...]:
    """A note if the run read files of other headers: a copy has the same, at another time."""
    told, ours = _headers(ledger.get("inputs")), _headers(input_entries(job))
    if told is None or ours is None or told == ours:
        return ()
    names = sorted({name for _, name, _ in told ^ ours})
    return (
        f"the ledger tells of other input files than those given here, such as {names[0]}; what "
        "they hold was compared",
    )


def _headers(inputs: Any) -> set[tuple[str, str, str]] | None:
    """Format, file and digest of all inputs, whatever their order; None if they are not told."""
    found = set()
    for entry in inputs if isinstance(inputs, list) else [None]:
        if not isinstance(entry, Mapping):
            return None
        files = entry.get("fingerprint")
        if not isinstance(files, Mapping) or not _are_texts(files.values()):
            return None
        form = str(entry.get("format"))
        found |= {(form, name, text.partition(" mtime_ns:")[0]) for name, text in files.items()}
    return found


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
    elif isinstance(ours, Within):
        is_number = isinstance(told, int | float) and not isinstance(told, bool)
        if not (is_number and ours.least <= told <= ours.most):
            yield f"{at} is {_text(told)}, expected {ours}"
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
