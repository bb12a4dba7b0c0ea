"""Two checkpoints, tensor by tensor: what only one has, shapes, dtypes, values, ranks."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.printable import one_line
from gemma_convert.convert.tensor import Tensor
from gemma_convert.convert.validation.alignment import align
from gemma_convert.convert.validation.configs import config_differences
from gemma_convert.convert.validation.diagnosis import exchanged, moved_rows, values
from gemma_convert.convert.validation.difference import Difference, compare
from gemma_convert.convert.validation.place import place
from gemma_convert.convert.validation.rank import PROBES, Rank, Ranks, difference_ranks
from gemma_convert.convert.validation.result import Finding, Result
from gemma_convert.convert.vocabulary import FirstRows

Progress = Callable[[int], None]

SAME, DIFFERS, SHAPE, ONLY_A, ONLY_B = "same", "differs", "shape", "only in A", "only in B"

_TEXTS = 3
"""Kinds of ranks that are told of one tensor's matrices."""

_COLUMNS = (
    "name",
    "module",
    "layer",
    "status",
    "shape_a",
    "shape_b",
    "dtype_a",
    "dtype_b",
    "same_bytes",
    "unequal",
    "size",
    "not_finite",
    "max_abs",
    "relative_frobenius",
    "cosine",
    "rank",
    "looks_like",
)


@dataclass(frozen=True)
class Entry:
    """One name of either checkpoint.

    Attributes:
        name: In the common spelling.
        status: ``same`` values, ``differs``, another ``shape``, ``only in A`` or ``only in B``.
        a: The first's tensor.
        b: The second's.
        difference: Of the values; of the rows that both have, where the shapes differ.
        rank: Of the difference, where it consists of matrices and was asked for.
        looks_like: What the difference looks like, in words.
    """

    name: str
    status: str
    a: Tensor | None
    b: Tensor | None
    difference: Difference | None = None
    rank: Ranks | None = None
    looks_like: str = ""

    def json(self) -> dict[str, Any]:
        """The entry for machines; ``_COLUMNS`` are its keys."""
        module, layer = place(self.name)
        shown: dict[str, Any] = dict.fromkeys(_COLUMNS)
        shown |= {"name": self.name, "module": module, "layer": layer, "status": self.status}
        for side, tensor in (("a", self.a), ("b", self.b)):
            if tensor is not None:
                shown[f"shape_{side}"] = list(tensor.shape)
                shown[f"dtype_{side}"] = str(tensor.dtype)
        if self.difference is not None:
            shown |= self.difference.json()
        if self.rank is not None:
            shown |= {"rank": self.rank.rank, "spectrum": self.rank.json()}
        shown["looks_like"] = self.looks_like
        return shown


def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    model: str | None = None,
    probes: int = PROBES,
    progress: Progress = lambda nbytes: None,
) -> Result:
    """Compare two checkpoints in whatever layouts.

    Args:
        a: The first, such as a base.
        b: The second, such as a tuned model.
        model: Name of a public model, where the layouts differ and neither has a config.json.
        probes: Singular values to look for in each difference of two matrices; 0 for none.
        progress: Called with bytes of ``a`` as they are compared.

    Returns:
        Every name, what differs most first; a finding for each that is not the same, and for each
        key of both config.json whose values differ.
    """
    aligned = align(a, b, model)
    entries = []
    for name in dict.fromkeys([*aligned.a, *aligned.b]):
        entries.append(_entry(name, aligned.a.get(name), aligned.b.get(name)))
        progress(aligned.a[name].nbytes if name in aligned.a else 0)
    entries = _explained(entries, probes)
    entries.sort(key=_most_different_first)
    different = [entry for entry in entries if entry.status != SAME]
    config = config_differences(a.config, b.config)
    return Result(
        check="diff",
        title=f"{a.source} against {b.source}",
        findings=(
            *(Finding("config.json", text) for text in _told(config)),
            *(Finding(entry.name, describe(entry)) for entry in different),
        ),
        summary=_summary(entries, aligned.spelling),
        data={
            "a": a.source,
            "b": b.source,
            "fingerprints": {"A": dict(a.fingerprint), "B": dict(b.fingerprint)},
            "spelling": aligned.spelling,
            "config": config,
            "modules": aggregated(entries, lambda entry: place(entry.name)[0]),
            "layers": aggregated(entries, lambda entry: place(entry.name)[1]),
            "tensors": [entry.json() for entry in entries],
        },
        notes=aligned.notes,
    )


def _entry(name: str, a: Tensor | None, b: Tensor | None) -> Entry:
    if a is None or b is None:
        return Entry(name, ONLY_B if a is None else ONLY_A, a, b)
    if a.shape != b.shape:
        return Entry(name, SHAPE, a, b, _of_common_rows(a, b))
    difference = compare(a, b)
    same = difference.unequal == 0 and a.dtype == b.dtype
    return Entry(name, SAME if same else DIFFERS, a, b, difference)


def _of_common_rows(a: Tensor, b: Tensor) -> Difference | None:
    """The difference of the rows that both have, where only the number of rows differs."""
    if len(a.shape) != len(b.shape) or not a.shape or a.shape[1:] != b.shape[1:]:
        return None
    rows = min(a.shape[0], b.shape[0])
    return compare(FirstRows(a, rows), FirstRows(b, rows))


def _explained(entries: Sequence[Entry], probes: int) -> list[Entry]:
    """The entries, those that differ with what their difference looks like."""
    differing = {e.name: e for e in entries if e.difference is not None and e.difference.unequal}
    first = {n: e.a for n, e in differing.items() if e.a is not None and e.status == DIFFERS}
    second = {n: e.b for n, e in differing.items() if e.b is not None and e.status == DIFFERS}
    owners = exchanged(first, second, first)
    done = []
    for entry in entries:
        if entry.name in first:
            a, b = first[entry.name], second[entry.name]
            entry = replace(entry, looks_like=owners.get(entry.name) or _looks_like(entry, a, b))
            if probes and not entry.looks_like:
                rank = difference_ranks(a, b, probes)
                entry = replace(entry, rank=rank, looks_like=_rank_text(rank))
        done.append(entry)
    return done


def _looks_like(entry: Entry, a: Tensor, b: Tensor) -> str:
    assert entry.difference is not None
    return values(a, b, entry.difference) or moved_rows(a, b)


def _rank_text(ranks: Ranks | None) -> str:
    if ranks is None:
        return ""
    if ranks.count == 1:
        return _of_one(ranks.matrices[0])
    texts = Counter(_of_one(rank) for rank in ranks.matrices)
    told = "; ".join(f"{text} in {count}" for text, count in texts.most_common(_TEXTS))
    more = f"; and {len(texts) - _TEXTS} other kinds" if len(texts) > _TEXTS else ""
    return f"of {ranks.count} matrices along the first axis: {told}{more}"


def _of_one(rank: Rank) -> str:
    if rank.is_low_rank and rank.rank == 0:
        return "no more than rounding"
    if rank.is_low_rank:
        return f"like a LoRA of rank {rank.rank}"
    if rank.rank is None:
        return f"of rank {len(rank.singular_values)} or more (--probes looks further)"
    return f"of rank {rank.rank}" + ("" if rank.explained else ", but the rest is not rounding")


def describe(entry: Entry) -> str:
    """An entry that is not the same, in words."""
    if entry.difference is None:
        shapes = [list(t.shape) for t in (entry.a, entry.b) if t is not None]
        return f"{entry.status} {' and '.join(map(str, shapes))}"
    assert entry.a is not None
    assert entry.b is not None
    parts = []
    if entry.status == SHAPE:
        parts.append(f"shape {list(entry.a.shape)} and {list(entry.b.shape)}; of the common rows")
    if entry.a.dtype != entry.b.dtype:
        parts.append(f"{entry.a.dtype} and {entry.b.dtype}")
    found = entry.difference
    parts.append(f"{found.unequal} of {found.size} values differ")
    if found.not_finite:
        parts.append(f"{found.not_finite} of them NaN or infinite")
    if found.unequal > found.not_finite:
        relative = "" if found.relative is None else f", relative {found.relative:.3g}"
        which = "the others " if found.not_finite else ""
        parts.append(f"{which}by up to {found.max_abs:.4g}{relative}")
    return ", ".join(parts) + (f" ({entry.looks_like})" if entry.looks_like else "")


def _most_different_first(entry: Entry) -> tuple[int, float]:
    found = entry.difference
    if found is not None and found.not_finite:
        return 0, -found.not_finite / found.size
    relative = found.relative if found is not None else None
    order = {DIFFERS: 2, SAME: 3}.get(entry.status, 1)
    return order, -(float("inf") if relative is None else relative)


def aggregated(entries: Sequence[Entry], key: Callable[[Entry], Any]) -> list[dict[str, Any]]:
    """The differences added up over groups of tensors: by module or by layer."""
    groups: dict[Any, list[Difference]] = {}
    for entry in entries:
        if entry.difference is not None:
            groups.setdefault(key(entry), []).append(entry.difference)
    listed = []
    for group, found in groups.items():
        total = sum(found, Difference())
        listed.append({"group": group, "tensors": len(found), **total.json()})
    return sorted(listed, key=lambda row: (row["group"] is None, row["group"]))


def _told(config: Mapping[str, Sequence[Any]]) -> list[str]:
    """A sentence for each key that both have: what one lacks may have a default there."""
    return [
        f"{key} is {one!r} in A and {other!r} in B"
        for key, (one, other) in config.items()
        if one is not None and other is not None
    ]


def _summary(entries: Sequence[Entry], spelling: str) -> tuple[tuple[str, str], ...]:
    count = {s: sum(e.status == s for e in entries) for s in (SAME, DIFFERS, SHAPE, ONLY_A, ONLY_B)}
    told = ", ".join(f"{n} {status}" for status, n in count.items() if n)
    total = sum((e.difference for e in entries if e.difference is not None), Difference())
    rows = [("names", spelling), ("tensors", told)]
    if total.unequal:
        share = total.unequal / total.size
        rows.append(("values", f"{total.unequal} of {total.size} differ ({share:.2%})"))
        if total.not_finite:
            rows.append(("not finite", f"{total.not_finite} of those, in one of the two"))
        rows.append(("largest", f"{total.max_abs:.4g}"))
        rows.append(("relative", f"{sqrt(total.d2 / total.a2):.3g}" if total.a2 else "-"))
    sought = [rank for e in entries if e.rank is not None for rank in e.rank.matrices]
    low = [rank for rank in sought if rank.is_low_rank and rank.rank]
    if sought:
        ranks = sorted({rank.rank for rank in low if rank.rank is not None})
        what = f"rank {', '.join(map(str, ranks))}" if ranks else "none"
        rows.append(("LoRA", f"{len(low)} of {len(sought)} changed matrices look like one: {what}"))
    return tuple(rows)


def as_csv(result: Result) -> str:
    """The tensors of a diff as CSV, a line each.

    Names are not trusted: text that a spreadsheet would compute begins with ``'``, and what is not
    printable is escaped.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in result.data["tensors"]:
        shapes = {k: "x".join(map(str, row[k] or ())) for k in ("shape_a", "shape_b")}
        cells = {**row, **shapes}
        writer.writerow({k: _cell(v) if isinstance(v, str) else v for k, v in cells.items()})
    return out.getvalue()


def _cell(text: str) -> str:
    return one_line(f"'{text}" if text.startswith(("=", "+", "-", "@", "'")) else text)
