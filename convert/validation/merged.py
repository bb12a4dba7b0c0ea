"""Whether a merged checkpoint is what base and LoRA factors make, weight by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.jobs import DType, Job, convert
from gemma_convert.convert.registry import recognise
from gemma_convert.convert.tensor import Array, Box, Tensor, blocks
from gemma_convert.convert.validation.diagnosis import moved_rows, values
from gemma_convert.convert.validation.difference import compare
from gemma_convert.convert.validation.exact import ErrorBound, Product, interval
from gemma_convert.convert.validation.ledger_check import check_ledger
from gemma_convert.convert.validation.result import Finding, Result
from gemma_convert.surgery.delta import Merged
from gemma_convert.surgery.merge_lora import deltas

SAMPLE_BLOCKS = 4
"""Blocks of each merged tensor that are computed again unless all are."""

SAMPLE_BYTES = 256 << 10
"""Size of such a block."""

_NEAR = 0.03
"""A scale this near to a known mistake's is taken for it: the change was rounded."""

Progress = Callable[[int], None]


@dataclass
class Recomputed:
    """One merged tensor against float64, added up over blocks.

    Attributes:
        checked: Weights compared.
        wrong: Weights that no order of float32 sums gives.
        undecided: Weights next to a rounding boundary, where two values are right.
        first: Index, expected and found value of the first wrong weight.
        along: Sum of (realised change times delta).
        delta2: Sum of the delta squared.
        change2: Sum of the realised change squared.
        error2: Sum of (realised change - delta) squared.
        twice_rounded: Weights that a delta rounded before the sum gives.
    """

    checked: int = 0
    wrong: int = 0
    undecided: int = 0
    first: tuple[list[int], float, float] | None = None
    along: float = 0.0
    delta2: float = 0.0
    change2: float = 0.0
    error2: float = 0.0
    twice_rounded: int = 0

    def json(self) -> dict[str, Any]:
        """For machines."""
        kept = self.error2 / self.delta2 if self.delta2 else 0.0
        return {
            "checked": self.checked,
            "wrong": self.wrong,
            "undecided": self.undecided,
            "scale": self.along / self.delta2 if self.delta2 else None,
            "relative_error": float(np.sqrt(kept)),
        }


def validate_merged(
    out: Checkpoint,
    source: Checkpoint,
    base: Checkpoint | None,
    *,
    alpha: float | None = None,
    every: bool = False,
    seed: int = 0,
    progress: Progress = lambda nbytes: None,
) -> Result:
    """Compute the merge of ``source`` into ``base`` again and compare ``out`` with it.

    Args:
        out: The merged checkpoint, in any layout.
        source: LoRA factors, with or without weights.
        base: The base that was merged into.
        alpha: LoRA alpha, where the source's metadata does not say it.
        every: Whether every block of a merged tensor is computed, not a sample.
        seed: Of the sample.
        progress: Called with bytes of ``out`` as they are done.

    Returns:
        A finding for each tensor that is not right, and for what the ledger says otherwise.

    Raises:
        GemmaConvertError: If the inputs do not fit together.
    """
    job = _job_of(out, source, base, alpha)
    if job.adapter is None:
        raise InputError(f"{source.source}: it holds no LoRA factors", "give the adapter")
    target = job.plan.target
    findings = [Finding(name, "missing") for name in target if name not in out]
    findings += [Finding(name, "not part of the merge") for name in out if name not in target]
    again = _again(job)
    random = np.random.default_rng(seed)
    found: dict[str, dict[str, Any]] = {}
    unchanged = 0
    for name, expected in target.items():
        if name not in out:
            continue
        tensor = out[name]
        if (problem := _misfit(tensor, expected)) is not None:
            findings.append(Finding(name, problem))
        elif isinstance(expected, Merged):
            boxes = _boxes(tensor, every, random)
            checked = _recompute(tensor, expected.weight, again[name], boxes)
            found[name] = checked.json()
            if checked.wrong:
                ranks = {pair.rank for pair in job.adapter.pairs.values()}
                findings.append(Finding(name, _describe(checked, str(tensor.dtype), ranks)))
        else:
            unchanged += 1
            difference = compare(expected, tensor)
            if not difference.same_bytes:
                cause = values(difference) or moved_rows(expected, tensor)
                text = f"{difference.unequal} of {difference.size} values are not the base's"
                findings.append(Finding(name, text + (f": {cause}" if cause else "")))
        progress(tensor.nbytes)
    ledger, notes = check_ledger(Path(out.source), job.adapter)
    findings += ledger
    return Result(
        check="merged",
        title=f"{out.source} from {source.source}" + (f" and {base.source}" if base else ""),
        findings=tuple(findings),
        summary=_summary(found, unchanged, every, notes),
        data={
            "out": out.source,
            "alpha": job.adapter.alpha,
            "fingerprints": {
                "merged": dict(out.fingerprint),
                "adapter": dict(source.fingerprint),
                "base": dict(base.fingerprint) if base is not None else {},
            },
            "tensors": found,
        },
        notes=notes,
    )


def _job_of(
    out: Checkpoint, source: Checkpoint, base: Checkpoint | None, alpha: float | None
) -> Job:
    """The job that should have made ``out``, in the dtype that ``out`` has."""
    layout = recognise(out)[1].layout
    job = convert(source, layout, base=base, alpha=alpha)
    stored = {tensor.dtype for tensor in out.values() if dtypes.is_float(tensor.dtype)}
    planned = {t.dtype for t in job.plan.target.values() if dtypes.is_float(t.dtype)}
    dtype: DType | None = next(iter(stored)) if len(stored) == 1 and stored != planned else None
    if dtype is None:
        return job
    return convert(source, layout, base=base, alpha=alpha, dtype=dtype)


def _again(job: Job) -> Mapping[str, tuple[Tensor, Tensor]]:
    """For each merged tensor its delta in float64, and how far float32 may be from it."""
    assert job.adapter is not None
    spelling = recognise(job.plan.target)[1]
    exact = deltas(job.adapter, job.model, spelling, Product)
    bounds = deltas(job.adapter, job.model, spelling, ErrorBound)
    return {name: (exact[name], bounds[name]) for name in exact}


def _misfit(tensor: Tensor, expected: Tensor) -> str | None:
    if (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype):
        return None
    return (
        f"expected {expected.dtype} {list(expected.shape)}, "
        f"found {tensor.dtype} {list(tensor.shape)}"
    )


def _boxes(tensor: Tensor, every: bool, random: np.random.Generator) -> Iterator[Box]:
    boxes = list(blocks(tensor, SAMPLE_BYTES))
    if every or len(boxes) <= SAMPLE_BLOCKS:
        return iter(boxes)
    chosen = random.choice(len(boxes), SAMPLE_BLOCKS, replace=False)
    return (boxes[i] for i in sorted(chosen))


def _recompute(
    tensor: Tensor, weight: Tensor, again: tuple[Tensor, Tensor], boxes: Iterator[Box]
) -> Recomputed:
    found = Recomputed()
    delta, bound = again
    for box in boxes:
        _add(found, box, tensor.read(box), weight.read(box), delta.read(box), bound.read(box))
    return found


def _add(
    found: Recomputed, box: Box, stored: Array, weight: Array, delta: Array, bound: Array
) -> None:
    exact, low, high = interval(weight, delta, bound)
    with np.errstate(over="ignore"):
        least, most = low.astype(stored.dtype), high.astype(stored.dtype)
    wrong = ~((least <= stored) & (stored <= most))
    found.checked += stored.size
    found.undecided += int(np.count_nonzero(least != most))
    found.wrong += int(np.count_nonzero(wrong))
    if wrong.any() and found.first is None:
        at = np.unravel_index(int(wrong.argmax()), wrong.shape)
        index = [int(i) + start for i, (start, _) in zip(at, box, strict=True)]
        found.first = (index, float(exact[at]), float(stored[at]))
    change = stored.astype(np.float64) - weight.astype(np.float64)
    found.along += float(np.vdot(change, delta))
    found.delta2 += float(np.vdot(delta, delta))
    found.change2 += float(np.vdot(change, change))
    found.error2 += float(np.vdot(change - delta, change - delta))
    early = weight.astype(np.float32) + delta.astype(stored.dtype).astype(np.float32)
    found.twice_rounded += int(np.count_nonzero(early.astype(stored.dtype) == stored))


def _describe(found: Recomputed, dtype: str, ranks: set[int]) -> str:
    assert found.first is not None
    index, expected, value = found.first
    text = (
        f"{found.wrong} of {found.checked} weights are not the rounded sum; "
        f"at {index} expected {expected:.8g} before rounding, found {value:.8g}"
    )
    cause = _cause(found, dtype, ranks)
    return f"{text}: {cause}" if cause else text


def _cause(found: Recomputed, dtype: str, ranks: set[int]) -> str:
    """What the realised change says about the mistake; empty if nothing fits."""
    if found.twice_rounded > 0.999 * found.checked:
        return f"the delta was rounded to {dtype} before it was added"
    if not found.delta2:
        return ""
    scale = found.along / found.delta2
    cosine = found.along / np.sqrt(found.delta2 * found.change2) if found.change2 else 0.0
    if not found.change2:
        return "the adapter was not applied"
    if abs(cosine) < 0.9:
        return "what was added is not this pair's A.B"
    known = [(2.0, "the adapter was applied twice"), (-1.0, "the adapter was subtracted")]
    for rank in sorted(ranks):
        known += [
            (1 / rank, "it was scaled by alpha / r^2"),
            (rank**0.5, "it was scaled by alpha / sqrt(r)"),
            (float(rank), "it was scaled by alpha"),
        ]
    likely = [text for factor, text in known if abs(scale / factor - 1) < _NEAR]
    told = f"what was added is {scale:.4g} times alpha / r A.B"
    return f"{told}: {', or '.join(likely)}" if likely else told


def _summary(
    found: Mapping[str, Mapping[str, Any]], unchanged: int, every: bool, notes: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    checked = sum(row["checked"] for row in found.values())
    wrong = sum(row["wrong"] for row in found.values())
    undecided = sum(row["undecided"] for row in found.values())
    how = "all blocks" if every else f"a sample of {SAMPLE_BLOCKS} blocks each"
    return (
        ("merged", f"{len(found)} tensors, {how}: {checked} weights computed again in float64"),
        ("wrong", f"{wrong} weights"),
        ("undecided", f"{undecided} where the order of float32 sums decides between neighbours"),
        ("others", f"{unchanged} tensors compared with the base's bytes"),
        ("ledger", "none" if notes else "files, sizes, sha256 and factors compared"),
    )
