"""The LoRA adapter that turns one checkpoint into another: truncated SVD of what changed.

A matrix whose change is not of low rank, a norm, an embedding or an expert is the rest: it is
listed, or saved whole in the adapter (``modules_to_save``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import einops
import numpy as np

from gemma_convert.convert import pattern as patterns
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.dtypes import DType
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.hf_form import HEAD
from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.model import Model, text_config
from gemma_convert.convert.tensor import Array, Box, Tensor
from gemma_convert.convert.vocabulary import EMBEDDING
from gemma_convert.surgery.adapter_output import adapter_job, sources_of, span
from gemma_convert.surgery.adapters.adapter import Adapter, Pair
from gemma_convert.surgery.adapters.forms import PEFT, QWIX, RANK
from gemma_convert.surgery.adapters.matrices import Computed
from gemma_convert.surgery.changes import Place, is_resized, places
from gemma_convert.surgery.exchange import Exchange
from gemma_convert.surgery.low_rank import Svd, leading_svd, relative_error

_FIRST = 32
"""Singular values computed first where the rank is chosen by energy; then twice as many."""

_NOT_COMPARED = "only one of the two has it"


@dataclass(frozen=True)
class Limits:
    """How much an adapter may hold, and how well.

    Attributes:
        rank: Of every pair, or the most where ``share`` is given.
        share: The share of a change's energy that its pair keeps; None to go by rank alone.
        error: The largest ||D - B.A|| / ||D|| of a pair; a change with more is not of low rank.
        dtype: Of the factors.
    """

    rank: int
    share: float | None
    error: float
    dtype: DType


@dataclass
class _Found:
    """What came of the comparison so far."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, str] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)
    short: dict[str, float] = field(default_factory=dict)
    embedding: str | None = None
    reasons: dict[int, str] = field(default_factory=dict)

    def leave(self, place: Place, reason: str) -> None:
        """Note why the tensors of a place are not read; another place of theirs may read them."""
        for tensor in (place.tuned, place.base):
            self.reasons |= dict.fromkeys(sources_of(tensor), reason)


class Whole(Tensor):
    """A weight that is saved whole, since its change against ``base`` is not of low rank."""

    def __init__(self, tuned: Tensor, base: Tensor) -> None:
        self.tuned = tuned
        self.base = base
        self.shape = tuned.shape
        self.dtype = tuned.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.tuned, self.base)

    def read(self, box: Box) -> Array:
        return self.tuned.read(box)


def extract_lora(
    tuned: Checkpoint,
    base: Checkpoint,
    model: Model,
    config: Mapping[str, Any],
    limits: Limits,
    *,
    to_peft: bool = True,
    save_rest: bool = False,
    base_id: str | None = None,
) -> Exchange:
    """The adapter whose deltas are ``tuned`` - ``base``. Alpha is the rank, but for `rows.Gain`.

    One change is in memory at a time, in float32, and the factors of all.

    Args:
        tuned: In any layout.
        base: In any layout.
        model: The base's dimensions.
        config: The base's config.json, if there is one: a nested one names its text model so.
        limits: Rank, energy, error, dtype.
        to_peft: Whether to write PEFT's format, else Tunix's.
        save_rest: Whether to save whole what is not of low rank. PEFT's format alone has a place.
        base_id: Hub id of the base, for adapter_config.json.

    Raises:
        AdapterError: If the two are not of one model, or no matrix changed by low rank.
    """
    nested = text_config(config) is not config
    prefix = "model.language_model." if nested else HF.default_prefix
    spelling = Spelling(HF, prefix) if to_peft else Spelling(TUNIX, "")
    found = _Found()
    for place in places(tuned, base, model, spelling):
        _take(found, place, model, spelling, limits, save_rest)
    if not found.pairs:
        raise _nothing_found(tuned.source, base.source, found)
    copies = frozenset(found.saved)
    ties_head = model.tied and found.embedding in found.saved and HEAD not in found.rest
    if ties_head and found.embedding:
        # PEFT copies the tied head too, and wants it in the file (ensure_weight_tying)
        found.saved[HEAD] = found.saved[found.embedding]
    adapter = Adapter(
        found.pairs,
        found.scales,
        spelling,
        tuned.source,
        saved=found.saved,
        copies=copies,
        ties_head=ties_head,
        notes=_notes(found, limits, to_peft),
    )
    tensors = (*tuned.values(), *base.values())
    return adapter_job(
        adapter,
        (tuned, base),
        model,
        reasons={id(tensor): _NOT_COMPARED for tensor in tensors} | found.reasons,
        details={"modules": found.modules, "rest": _rest(found)},
        summary=tuple(_summary(found)),
        base=(base_id, None),
    )


def _nothing_found(tuned: str, base: str, found: _Found) -> AdapterError:
    if not found.rest:
        return AdapterError(
            f"{tuned}: all weights are those of {base}", "give a base and what was trained from it"
        )
    name, reason = next(iter(found.rest.items()))
    return AdapterError(
        f"{tuned}: {len(found.rest)} tensors differ from {base}, and none is a matrix whose change "
        f"is of low rank, such as {name} ({reason})",
        "are these the checkpoints meant? A higher --rank or --max-error takes more in",
    )


def _take(
    found: _Found, place: Place, model: Model, spelling: Spelling, limits: Limits, save: bool
) -> None:
    """Add one weight to what was found."""
    if place.parameter is not None and place.parameter.unread:
        found.leave(place, "the model never reads it")
        return
    resized = bool(place.new_rows) and is_resized(place, model)
    if not resized and not place.differs():
        found.leave(place, "the same in both")
        return
    reason = _no_matrix(place, resized) or _factorise(found, place, spelling, limits)
    if not reason:
        return
    found.rest[place.name] = reason
    if place.parameter is not None and place.parameter.row.name == EMBEDDING:
        found.embedding = place.name
    # PEFT saves modules: a weight that lies in one by itself
    module = place.parameter is not None or place.name == HEAD
    if save and place.name.endswith(".weight") and module:
        found.saved[place.name] = Whole(place.tuned, place.base)
    else:
        found.leave(place, f"not of low rank: {reason}")


def _no_matrix(place: Place, resized: bool) -> str:
    """Why the change of a weight cannot be a pair; empty if it can."""
    row = place.parameter.row if place.parameter is not None else None
    if row is None:
        return "a head of its own" if place.name == HEAD else "outside the text model"
    if row.is_product:
        return ""
    if resized:
        return f"{place.base.shape[0]} rows became {place.tuned.shape[0]}"
    if row.lookup:
        return "an embedding"
    return "a stack of experts" if row.stacked else "a norm or a scalar"


def _factorise(found: _Found, place: Place, spelling: Spelling, limits: Limits) -> str:
    """Add the pair of a changed matrix; else why there is none."""
    assert place.parameter is not None
    row, layout = place.parameter.row, spelling.layout
    inputs, outputs = row.factor_axes(layout)
    text, flat = row.cell(layout).pattern.text, f"({' '.join(outputs)}) ({' '.join(inputs)})"
    axes = {axis: place.parameter.sizes[axis] for axis in row.cell(layout).pattern.axes}
    matrix = einops.rearrange(place.delta(), f"{text} -> {flat}", **axes)
    svd, rank = _decomposed(matrix, limits)
    a, b = (factor.astype(limits.dtype) for factor in svd.factors(rank))
    error = relative_error(matrix, a, b)
    told = {"rank": rank, "energy": svd.kept(rank), "relative_error": error}
    if error > limits.error:
        return f"at rank {rank} {error:.0%} of the change is missing"
    form = PEFT if layout is HF else QWIX
    parents = (place.tuned, place.base)
    lay = [f"{RANK} ({' '.join(inputs)})", f"({' '.join(outputs)}) {RANK}"]
    factors = [
        Computed(_laid(factor, source, target.text, {**axes, RANK: rank}), parents)
        for factor, source, target in zip((a, b), lay, form.patterns(row, layout), strict=True)
    ]
    found.pairs[place.name] = Pair(factors[0], factors[1], (form,))
    if limits.share is not None and rank < (svd.rank_for(limits.share) or rank + 1):
        found.short[place.name] = told["energy"]
    found.scales[place.name] = place.parameter.gain(layout)
    found.modules[place.name] = told | {"shape": list(matrix.shape)}
    return ""


def _laid(factor: Array, source: str, target: str, sizes: Mapping[str, int]) -> Array:
    used = {axis: sizes[axis] for axis in patterns.parse(source).axes}
    return np.ascontiguousarray(einops.rearrange(factor, f"{source} -> {target}", **used))


def _decomposed(matrix: Array, limits: Limits) -> tuple[Svd, int]:
    """The decomposition of a change, and the rank that its pair gets."""
    most = min(limits.rank, *matrix.shape)
    if limits.share is None:
        return leading_svd(matrix, most), most
    count = min(_FIRST, most)
    while True:
        svd = leading_svd(matrix, count)
        rank = svd.rank_for(limits.share)
        if rank is not None or count == most:
            return svd, min(rank or most, most)
        count = min(2 * count, most)


def _notes(found: _Found, limits: Limits, to_peft: bool) -> tuple[str, ...]:
    notes = []
    if found.short:
        worst = min(found.short, key=lambda name: found.short[name])
        notes.append(
            f"{len(found.short)} pairs keep less than the energy {limits.share:g} asked for, since "
            f"--max-rank is {limits.rank}: the least {found.short[worst]:.4g}, {worst}"
        )
    left = [name for name in found.rest if name not in found.saved]
    if left:
        how = "; --save-rest saves whole modules" if to_peft and not found.saved else ""
        notes.append(
            f"{len(left)} tensors changed that the adapter does not hold, such as {left[0]} "
            f"({found.rest[left[0]]}){how}"
        )
    resized = found.rest.get(found.embedding or "", "")
    if found.embedding in found.saved and "became" in resized:
        notes.append(f"{found.embedding}: {resized}: resize the base's before loading the adapter")
    return tuple(notes)


def _rest(found: _Found) -> list[dict[str, Any]]:
    return [
        {"name": name, "reason": reason, "saved": name in found.saved}
        for name, reason in found.rest.items()
    ]


def _summary(found: _Found) -> Iterable[tuple[str, str]]:
    modules = found.modules
    worst = max(modules, key=lambda name: modules[name]["relative_error"])
    ranks, kept = (span(round(m[key], 6) for m in modules.values()) for key in ("rank", "energy"))
    saved = sum(name in found.saved for name in found.rest)
    yield "pairs", f"{len(modules)}, rank {ranks}, alpha = rank"
    yield "energy kept", f"{kept} of each change's"
    yield "worst error", f"{modules[worst]['relative_error']:.3g} of the change's norm: {worst}"
    if found.rest:
        yield "not of low rank", f"{len(found.rest)} tensors, {saved} of them saved"
