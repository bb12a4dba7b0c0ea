"""The ledger of a run: what was done to how many tensors, at what cost, from which inputs.

It is written as ``conversion.json`` into the output and shown as a table.
"""

from __future__ import annotations

import json
import platform
import resource
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from gemma_convert import __version__
from gemma_convert.convert.digests import sha256_of
from gemma_convert.convert.job import Job
from gemma_convert.convert.model import Model
from gemma_convert.convert.plan import Plan
from gemma_convert.convert.readers.provenance import LEDGER_NAME
from gemma_convert.convert.tensor import Tensor, ancestry
from gemma_convert.convert.values import Revalued
from gemma_convert.surgery.adapters.adapter import Adapter, digest
from gemma_convert.surgery.compare import Compared, Difference
from gemma_convert.surgery.delta import LowRank, Merged, Survival

__all__ = ["LEDGER_NAME", "file_digests", "make_ledger"]

_PACKAGES = ("numpy", "ml-dtypes", "einops", "safetensors", "tensorstore", "orbax-checkpoint")


def make_ledger(job: Job, command: list[str], seconds: float) -> dict[str, Any]:
    """Everything that can be said of a finished run but its output files.

    Args:
        job: What was done; its tensors have been read, so that the merge knows its losses.
        command: The command line.
        seconds: Wall time from the plan to the verified output.
    """
    plan = job.plan
    ledger: dict[str, Any] = {
        "tool": f"gemma-convert {__version__}",
        "command": shlex.join(command),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        **({"model": model_entry(job.model)} if job.model is not None else {}),
        "inputs": input_entries(job),
        "counts": plan.counts,
        "notes": list(
            dict.fromkeys((*plan.target.notes, *(n for s in plan.sources for n in s.notes)))
        ),
        "dropped": dict(plan.dropped),
        "bytes": plan.target.nbytes,
        "seconds": round(seconds, 3),
        "peak_memory_bytes": peak_memory(),
        "tensors": tensor_entries(plan),
    }
    ledger |= job.details
    if job.summary:
        ledger["summary"] = dict(job.summary)
    if computed := _computed(plan.target):
        ledger["computed"] = computed
    if job.bases is not None:
        ledger["base"] = _base(*job.bases, plan.target)
    if job.adapters:
        ledger |= _merge(job)
    merged = [
        {key: adapter[key] for key in ("source", "weight", "factors_sha256", "same_as")}
        for adapter in ledger.get("adapters", ())
    ]
    if merged or job.merged_before:
        ledger["merged"] = [*job.merged_before, *merged]
    return ledger


def tensor_entries(plan: Plan) -> dict[str, dict[str, Any]]:
    """What was done to each tensor, and what came out."""
    return {
        name: {
            "action": plan.actions[name],
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
        }
        for name, tensor in plan.target.items()
    }


def _base(used: str, other: str, target: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which version of a quantised base was used, and how far the other one is from it."""
    found = {
        name: sum((step.difference for step in steps), Difference())
        for name, tensor in target.items()
        if (steps := [step for step in ancestry(tensor) if isinstance(step, Compared)])
    }
    if not found:
        return {"used": used}
    return {
        "used": used,
        "compared_with": other,
        **_difference(sum(found.values(), Difference())),
        "by_tensor": {name: _difference(one) for name, one in found.items()},
    }


def _difference(difference: Difference) -> dict[str, float]:
    return {"largest": difference.largest, "mean": difference.mean}


def model_entry(model: Model) -> dict[str, Any]:
    return {"family": model.family.name, "name": model.name, "layers": len(model.layers)}


def _computed(target: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors whose values were computed, and how many of those the way back would not find."""
    found = {
        name: (sum(step.lost for step in steps), tensor.size)
        for name, tensor in target.items()
        if (steps := [step for step in ancestry(tensor) if isinstance(step, Revalued)])
        and not isinstance(tensor, Merged)
    }
    if not found:
        return {}
    return {
        "tensors": len(found),
        "values": sum(size for _, size in found.values()),
        "not_exact": sum(lost for lost, _ in found.values()),
        "not_exact_by_tensor": {name: lost for name, (lost, _) in found.items() if lost},
    }


def input_entries(job: Job) -> list[dict[str, Any]]:
    """What identifies the inputs of ``job``."""
    return [
        {"path": s.source, "format": s.format, "fingerprint": dict(s.fingerprint)}
        for s in job.plan.sources
    ]


def _merge(job: Job) -> dict[str, Any]:
    """Pairs found, applied and changed, and what the rounding left of their deltas."""
    merged = {n: t for n, t in job.plan.target.items() if isinstance(t, Merged)}
    pairs = {name: pairs_in(tensor) for name, tensor in merged.items()}
    applied = set().union(*pairs.values())
    changed = set().union(*(pairs[n] for n, tensor in merged.items() if tensor.survival.changed))
    total = sum((tensor.survival for tensor in merged.values()), Survival())
    return {
        "adapters": [adapter_entry(adapter, applied, changed) for adapter in job.adapters],
        "survival": _survival(total),
        "survival_by_tensor": {name: _survival(t.survival) for name, t in merged.items()},
    }


def pairs_in(tensor: Merged) -> set[int]:
    """The pairs that are merged into ``tensor``, by the identities of their factors A.

    Placing a pair makes a new one of the same factors.
    """
    return {id(step.pair.a) for step in ancestry(tensor) if isinstance(step, LowRank)}


def adapter_entry(adapter: Adapter, applied: set[int], changed: set[int]) -> dict[str, Any]:
    """What the ledger tells of one adapter.

    Args:
        adapter: The adapter.
        applied: Which pairs were merged, see `pairs_in`.
        changed: Which of them changed a weight.
    """
    return {
        "source": adapter.source,
        "kind": adapter.kind,
        "weight": adapter.weight,
        "ranks": adapter.ranks,
        "scales": sorted(set(adapter.scales.values())),
        "pairs_found": len(adapter.pairs),
        "pairs_applied": sum(id(pair.a) in applied for pair in adapter.pairs.values()),
        "pairs_changed": sum(id(pair.a) in changed for pair in adapter.pairs.values()),
        "unchanged": [name for name, pair in adapter.pairs.items() if id(pair.a) not in changed],
        "replaced": list(adapter.saved),
        "factors_sha256": digest(adapter),
        "same_as": list(adapter.same_as),
    }


def _survival(survival: Survival) -> dict[str, Any]:
    return {
        "relative_error": survival.relative_error,
        "weights_changed": survival.changed,
        "weights": survival.size,
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that touch the numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        found[package] = metadata.version(package)
    return found


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def ledger_text(ledger: Mapping[str, Any]) -> str:
    """A ledger as its file has it."""
    return json.dumps(ledger, indent=2, allow_nan=False) + "\n"


def file_digests(directory: Path, known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file below ``directory``; those in ``known`` are not read again.

    A ledger is none of them: a run killed after it wrote its ledger left one there.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        name = str(path.relative_to(directory))
        if name == LEDGER_NAME:
            continue
        digest = known.get(name) or sha256_of(path)
        found[name] = {"bytes": path.stat().st_size, "sha256": digest}
    return found
