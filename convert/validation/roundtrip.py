"""A checkpoint through another layout and back, in memory, block by block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.dtypes import DType
from gemma_convert.convert.errors import InputError, LayoutError
from gemma_convert.convert.job import Job
from gemma_convert.convert.job_notes import computed_note
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, LAYOUTS, Layout, Spelling
from gemma_convert.convert.plan import reached
from gemma_convert.convert.registry import recognise
from gemma_convert.convert.tensor import Tensor, ancestry, cast
from gemma_convert.convert.validation.alignment import renamed
from gemma_convert.convert.validation.difference import Difference, compare, paired_blocks
from gemma_convert.convert.validation.result import Finding, Result
from gemma_convert.surgery.adapters.qwix import split_factors
from gemma_convert.surgery.quantised import is_quantised

Progress = Callable[[int], None]

_WIDE = np.dtype(np.float64)


@dataclass(frozen=True)
class Trip:
    """One tensor through one layout and back."""

    name: str
    via: str
    sha256: str
    sha256_back: str
    difference: Difference | None
    steps: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every bit came back."""
        return self.sha256 == self.sha256_back

    def json(self) -> dict[str, Any]:
        """For machines."""
        told = self.difference.json() if self.difference is not None else {}
        return {
            "name": self.name,
            "via": self.via,
            "exact": self.exact,
            "sha256": self.sha256,
            "sha256_back": self.sha256_back,
            "steps": list(self.steps),
            **told,
        }


def validate_roundtrip(
    source: Checkpoint,
    via: Sequence[str] | None = None,
    *,
    base: Checkpoint | None = None,
    model: str | None = None,
    computed_dtype: DType | None = _WIDE,
    progress: Progress = lambda nbytes: None,
) -> Result:
    """Bring ``source`` to each layout of ``via`` and back, and compare every bit.

    Args:
        source: Weights in any layout; LoRA factors are left out.
        via: Names of layouts; all but the source's that its family has, if None.
        base: HF directory that gives config and towers, where ``source`` has none.
        model: Name of a public model, where nothing has a config.json.
        computed_dtype: Stored dtype of tensors whose values the two layouts store differently; in
            float64 those of any other dtype come back, in the source's own, None, not all do.
        progress: Called with bytes as they come back.

    Returns:
        A finding for each tensor that does not come back bit for bit.

    Raises:
        GemmaConvertError: If config and tensors do not fit together.
    """
    weights, pairs = split_factors(source)
    if not weights or "adapter_config" in source.metadata:
        raise InputError(
            f"{source.source}: LoRA factors alone, no weights that could go through a layout",
            "give the base, or a checkpoint that they are merged into",
        )
    weights, spelling = recognise(weights)
    own = spelling.layout
    notes: tuple[str, ...] = (f"{len(pairs)} LoRA pairs are left out",) if pairs else ()
    quantised = [name for name, tensor in weights.items() if is_quantised(tensor)]
    if quantised:
        notes += (
            f"{len(quantised)} quantised weights, such as {quantised[0]}, go as the numbers that "
            "they stand for",
        )
    chosen = [LAYOUTS[name] for name in dict.fromkeys(via)] if via else _others(own)
    if own in chosen:
        others = ", ".join(layout.name for layout in _others(own))
        raise InputError(
            f"{source.source}: in the layout {own.name} already, there is no way through it",
            f"name others: {others}",
        )
    trips: list[Trip] = []
    done: list[str] = []
    refused: LayoutError | None = None
    for layout in chosen:
        try:
            there = convert(
                weights, layout, base=_base(base, own), model=model, computed_dtype=computed_dtype
            )
        except LayoutError as error:
            if via:
                raise
            refused = error
            notes += (f"not through {layout.name}: {error.what}",)
            continue
        done.append(layout.name)
        back = _back(there, weights, own, base, model)
        came = _came_back(back, spelling)
        # other notes of a conversion are of its output, and none is written here
        notes += computed_note(there.plan.target, own, layout)
        made = _trips(weights, came, reached(there.plan.target), layout, progress)
        trips += made
        gone = {trip.name for trip in made}
        dropped = {**there.plan.dropped, **back.plan.dropped}
        lost = [n for n in weights if n not in came and n not in dropped]
        trips += [Trip(name, layout.name, "", "not there", None, ()) for name in lost]
        left = [n for n in there.plan.dropped if n in weights and n not in gone]
        if left:
            reason = there.plan.dropped[left[0]]
            notes += (f"{len(left)} tensors are not in {layout.name}, as {left[0]}: {reason}",)
    if refused is not None and not done:
        raise refused
    return _result(source, own, trips, done, notes)


def _others(own: Layout) -> list[Layout]:
    return [layout for layout in LAYOUTS.values() if layout is not own]


def _base(base: Checkpoint | None, own: Layout) -> Checkpoint | None:
    return None if own is HF else base


def _back(
    there: Job, source: Checkpoint, own: Layout, base: Checkpoint | None, model: str | None
) -> Job:
    """The way back; a Hugging Face source gives config and towers, as a base does."""
    passed = Checkpoint(there.plan.target.tensors, config=there.plan.target.config)
    return convert(passed, own, base=source if own is HF else None, model=model)


def _came_back(back: Job, own: Spelling) -> Mapping[str, Tensor]:
    """What comes back, under the prefix that the source's names have."""
    if own.layout is HF:
        return back.plan.target
    return renamed(back.plan.target, Spelling(own.layout, own.layout.default_prefix), own)


def _trips(
    source: Checkpoint,
    came: Mapping[str, Tensor],
    there: set[int],
    layout: Layout,
    progress: Progress,
) -> list[Trip]:
    """Every tensor that comes back; one that ``layout`` has no place for did not go there.

    Args:
        source: What went there.
        came: What came back.
        there: Identities of the tensors that went.
        layout: The layout.
        progress: Called with bytes as they come back.
    """
    found = []
    for name, tensor in came.items():
        if name in source and any(id(step) in there for step in ancestry(tensor)):
            found.append(_trip(name, source[name], tensor, layout))
            progress(tensor.nbytes)
    return found


def _trip(name: str, before: Tensor, back: Tensor, layout: Layout) -> Trip:
    after = cast(back, before.dtype)  # values that were kept in a wider dtype on the way
    steps = tuple(dict.fromkeys(step.action for step in ancestry(after)))
    if before.shape != after.shape:
        shapes = f"{list(before.shape)} came back as {list(after.shape)}"
        return Trip(name, layout.name, "", shapes, None, steps)
    one, other = hashlib.sha256(), hashlib.sha256()
    for x, y in paired_blocks(before, after):
        one.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
        other.update(np.ascontiguousarray(y).reshape(-1).view(np.uint8).data)
    same = one.digest() == other.digest()
    difference = None if same else compare(before, after)
    return Trip(name, layout.name, one.hexdigest(), other.hexdigest(), difference, steps)


def _result(
    source: Checkpoint, own: Layout, trips: list[Trip], done: list[str], notes: tuple[str, ...]
) -> Result:
    findings = tuple(
        Finding(trip.name, f"through {trip.via} and back: {_inexact(trip)}")
        for trip in trips
        if not trip.exact
    )
    summary = [("layout", own.name)]
    for layout in done:
        of = [trip for trip in trips if trip.via == layout]
        exact = sum(trip.exact for trip in of)
        summary.append((f"via {layout}", f"{exact} of {len(of)} tensors come back bit for bit"))
    return Result(
        check="roundtrip",
        title=f"{source.source} through {', '.join(done) or 'no other layout'} and back",
        findings=findings,
        summary=tuple(summary),
        data={
            "source": source.source,
            "fingerprints": {"source": dict(source.fingerprint)},
            "via": done,
            "tensors": [trip.json() for trip in trips],
        },
        notes=notes,
    )


def _inexact(trip: Trip) -> str:
    if trip.difference is None:
        return trip.sha256_back
    found = trip.difference
    relative = "" if found.relative is None else f", relative {found.relative:.3g}"
    return (
        f"{found.unequal} of {found.size} values differ by up to {found.max_abs:.4g}{relative} "
        f"(on the way: {', '.join(trip.steps)})"
    )
