"""Whether a merged checkpoint is what base and adapters make, weight by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.bases import FULL
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.dtypes import DType
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.job import Job
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.registry import recognise
from gemma_convert.convert.tensor import Box, Tensor, ancestry, blocks
from gemma_convert.convert.validation.diagnosis import moved_rows, values
from gemma_convert.convert.validation.difference import compare
from gemma_convert.convert.validation.exact_dora import BOUND, EXACT
from gemma_convert.convert.validation.files_check import check_files
from gemma_convert.convert.validation.ledger_check import (
    NOT_COMPARED,
    check_ledger,
    ledger_directory,
    require_same_base,
)
from gemma_convert.convert.validation.recomputed import Delta, Recomputed, recompute
from gemma_convert.convert.validation.result import Finding, Result
from gemma_convert.convert.values import Revalued
from gemma_convert.surgery.adapters.open import Source
from gemma_convert.surgery.delta import Merged
from gemma_convert.surgery.merge_lora import all_deltas
from gemma_convert.surgery.training_base import Choice

SAMPLE_BLOCKS = 4
"""Blocks of each merged tensor that are computed again unless all are."""

SAMPLE_BYTES = 256 << 10
"""Size of such a block."""

Progress = Callable[[int], None]


def planned(
    out: Checkpoint,
    source: Checkpoint,
    base: Checkpoint | None,
    *,
    model: str | None = None,
    alpha: float | None = None,
    adapters: Sequence[Source] = (),
    base_quantization: Choice = None,
) -> Job:
    """The job that should have made ``out``, in the layout and the dtypes that it has.

    Args:
        out: The merged checkpoint.
        source: What was converted: weights, factors, or both.
        base: As in `convert`.
        model: As in `convert`.
        alpha: As in `convert`.
        adapters: As in `convert`.
        base_quantization: As in `convert`.

    Raises:
        GemmaConvertError: If the inputs do not fit together.
    """
    out, spelling = recognise(out)
    layout = spelling.layout

    def job(dtype: DType | None = None, computed: DType | None = None) -> Job:
        return convert(
            source,
            layout,
            base=base,
            model=model,
            alpha=alpha,
            adapters=adapters,
            allow_unchanged=True,
            merge_again=True,
            base_quantization=base_quantization,
            dtype=dtype,
            computed_dtype=computed,
        )

    first = job()
    target = first.plan.target
    if all(out[name].dtype == tensor.dtype for name, tensor in target.items() if name in out):
        return first
    return job(_stored(out, target, computed=False), _stored(out, target, computed=True))


def validate_merged(
    out: Checkpoint,
    job: Job,
    *,
    every: bool = False,
    seed: int = 0,
    progress: Progress = lambda nbytes: None,
) -> Result:
    """Compute a merge again and compare ``out`` with it.

    Args:
        out: The merged checkpoint.
        job: What should have made it; see `planned`.
        every: Whether every block of a merged tensor is computed, not a sample.
        seed: Of the sample.
        progress: Called with bytes of ``out`` as they are done.

    Returns:
        A finding for each tensor that is not right, and for what the ledger says otherwise.

    Raises:
        InputError: If the job merges nothing, or another version of the base than the ledger says.
    """
    sources = [source.source for source in job.plan.sources]
    if not job.adapters:
        raise InputError(f"{' and '.join(sources)}: no LoRA factors there", "give the adapter")
    directory = ledger_directory(out)
    require_same_base(directory, job)
    target = job.plan.target
    small = check_files(out, target)
    out = recognise(out)[0]
    findings = [Finding(name, "missing") for name in target if name not in out]
    findings += [Finding(name, "not part of the merge") for name in out if name not in target]
    again = _again(job)
    replaced = {id(tensor) for adapter in job.adapters for tensor in adapter.saved.values()}
    random = np.random.default_rng(seed)
    found: dict[str, Recomputed] = {}
    unchanged = 0
    for name, expected in target.items():
        if name not in out:
            continue
        tensor = out[name]
        if (problem := _misfit(tensor, expected)) is not None:
            findings.append(Finding(name, problem))
        elif isinstance(expected, Merged):
            boxes = _boxes(tensor, every, random)
            checked = recompute(tensor, expected.weight, again[name], boxes)
            found[name] = checked
            if checked.wrong:
                findings.append(Finding(name, checked.describe(str(tensor.dtype))))
        else:
            unchanged += 1
            if (problem := _difference(tensor, expected, replaced)) is not None:
                findings.append(Finding(name, problem))
        progress(tensor.nbytes)
    ledger, notes = check_ledger(directory, job, found)
    findings += [*small, *ledger]
    if job.bases is not None and job.bases[0] != FULL:
        notes += (f"merged onto {job.bases[0]}: how that was quantised is not computed again",)
    return Result(
        check="merged",
        title=f"{out.source} from {' and '.join(sources)}",
        findings=tuple(findings),
        summary=_summary(found, unchanged, every, notes),
        data={
            "out": out.source,
            "adapters": [
                {
                    "source": adapter.source,
                    "kind": adapter.kind,
                    "weight": adapter.weight,
                    "scales": sorted(set(adapter.scales.values())),
                }
                for adapter in job.adapters
            ],
            "fingerprints": {
                "merged": dict(out.fingerprint),
                **{source.source: dict(source.fingerprint) for source in job.plan.sources},
            },
            "tensors": {name: checked.json() for name, checked in found.items()},
        },
        notes=notes,
    )


def _stored(out: Checkpoint, target: Mapping[str, Tensor], *, computed: bool) -> DType | None:
    """The dtype of all floats of ``out`` whose values the layouts store alike, or differently."""
    found = {
        out[name].dtype
        for name, tensor in target.items()
        if name in out
        and dtypes.is_float(tensor.dtype)
        and any(isinstance(step, Revalued) for step in ancestry(tensor)) == computed
    }
    return found.pop() if len(found) == 1 else None


def _again(job: Job) -> dict[str, list[Delta]]:
    """For each merged tensor what is added to it, in float64."""
    assert job.model is not None
    target = job.plan.target
    spelling = recognise(target)[1]
    plain = {n: t.weight if isinstance(t, Merged) else t for n, t in target.items()}
    weights = target.replace(tensors=plain)
    found: dict[str, list[Delta]] = {}
    for adapter in job.adapters:
        exact = all_deltas(adapter, job.model, weights, spelling, EXACT)
        bounds = all_deltas(adapter, job.model, weights, spelling, BOUND)
        for name, delta in exact.items():
            found.setdefault(name, []).append(Delta(adapter, delta, bounds[name]))
    return found


def _misfit(tensor: Tensor, expected: Tensor) -> str | None:
    if (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype):
        return None
    return (
        f"expected {expected.dtype} {list(expected.shape)}, "
        f"found {tensor.dtype} {list(tensor.shape)}"
    )


def _difference(tensor: Tensor, expected: Tensor, replaced: set[int]) -> str | None:
    """How a tensor without a pair differs from what it should be; None if it does not."""
    difference = compare(expected, tensor)
    if difference.same_bytes:
        return None
    whose = "adapter" if any(id(step) in replaced for step in ancestry(expected)) else "base"
    text = f"{difference.unequal} of {difference.size} values are not the {whose}'s"
    cause = values(expected, tensor, difference) or moved_rows(expected, tensor)
    return text + (f": {cause}" if cause else "")


def _boxes(tensor: Tensor, every: bool, random: np.random.Generator) -> Iterator[Box]:
    boxes = list(blocks(tensor, SAMPLE_BYTES))
    if every or len(boxes) <= SAMPLE_BLOCKS:
        return iter(boxes)
    chosen = random.choice(len(boxes), SAMPLE_BLOCKS, replace=False)
    return (boxes[i] for i in sorted(chosen))


def _summary(
    found: Mapping[str, Recomputed], unchanged: int, every: bool, notes: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    checked = sum(row.checked for row in found.values())
    wrong = sum(row.wrong for row in found.values())
    undecided = sum(row.undecided for row in found.values())
    how = "all blocks" if every else f"a sample of {SAMPLE_BLOCKS} blocks each"
    no_ledger = any(note.endswith(NOT_COMPARED) for note in notes)
    return (
        ("merged", f"{len(found)} tensors, {how}: {checked} weights computed again in float64"),
        ("wrong", f"{wrong} weights"),
        ("undecided", f"{undecided} where the order of float32 sums decides between neighbours"),
        ("others", f"{unchanged} tensors compared with the base's bytes"),
        ("ledger", "none" if no_ledger else "files, sizes, sha256, tensors and factors compared"),
    )
