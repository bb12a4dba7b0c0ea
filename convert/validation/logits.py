"""The same token ids through two engines: one in memory at a time, the first's scores on disk."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.validation.engines.base import About, Engine, Logits, Source, TopK
from gemma_convert.convert.validation.metrics import Comparison, compare, kept_positions
from gemma_convert.convert.validation.prompts import Prompt, check_bos, check_ids, limited
from gemma_convert.convert.validation.result import Finding, Result
from gemma_convert.convert.validation.verdict import (
    Limits,
    first_diverging,
    is_diverging,
    judge,
    layers_text,
    worst,
)

MOST_POSITIONS = 512
"""Positions compared of a long prompt."""

Tell = Callable[[str], None]


def validate_logits(
    a: Source,
    b: Source,
    prompts: Sequence[Prompt],
    limits: Limits,
    *,
    bos: int,
    layers: bool = False,
    positions: int = MOST_POSITIONS,
    scratch: Path | None = None,
    notes: Sequence[str] = (),
    findings: Sequence[Finding] = (),
    tell: Tell = lambda text: None,
) -> Result:
    """Run both engines on the same ids and compare their scores.

    Args:
        a: The one that counts as right.
        b: The one to judge.
        prompts: What to run.
        limits: What may differ.
        bos: The id of the BOS.
        layers: Whether to look for the first diverging layer.
        positions: Positions of a prompt that are compared at most.
        scratch: Where to keep the first engine's scores meanwhile; the system's temporary
            directory if None.
        notes: What was noticed before.
        findings: What was found wrong before.
        tell: Called with a line for each prompt that an engine runs.

    Raises:
        InputError: If a prompt does not begin with exactly one BOS or has ids that a side does not
            know, if none is left, and if ``layers`` are wanted of models of other depths.
    """
    check_bos(prompts, bos)
    check_ids(prompts, {source.about.name: source.about.vocabulary for source in (a, b)})
    told = {source.about.name: source.about.limit for source in (a, b)}
    chosen, left_out = limited(prompts, told)
    if not chosen:
        raise InputError("no prompt is short enough for both", "; ".join(left_out))
    with tempfile.TemporaryDirectory(prefix="gemma-convert-logits-", dir=scratch) as directory:
        kept = Path(directory)
        _run_first(a, chosen, positions, layers, kept, tell)
        comparisons = _run_second(b, chosen, positions, layers, kept, tell)
    return _result(
        a.about, b.about, comparisons, limits, [*notes, *left_out, *_notes(a, b)], findings
    )


def _run_first(
    source: Source,
    prompts: Sequence[Prompt],
    most: int,
    layers: bool,
    directory: Path,
    tell: Tell,
) -> None:
    engine = source.load()
    for i, prompt in enumerate(prompts):
        tell(_line(engine, prompt))
        _save(directory / str(i), _run(engine, prompt, most, layers))
    del engine
    gc.collect()


def _run_second(
    source: Source,
    prompts: Sequence[Prompt],
    most: int,
    layers: bool,
    directory: Path,
    tell: Tell,
) -> list[Comparison]:
    engine = source.load()
    found = []
    for i, prompt in enumerate(prompts):
        ids, keep = list(prompt.ids), kept_positions(len(prompt.ids), most)
        tell(_line(engine, prompt))
        scores = _run(engine, prompt, most, layers)
        found.append(compare(prompt.name, ids, keep, _load(directory / str(i)), scores))
    return found


def _run(engine: Engine, prompt: Prompt, most: int, layers: bool) -> Logits | TopK:
    return engine.run(list(prompt.ids), kept_positions(len(prompt.ids), most), layers=layers)


def _line(engine: Engine, prompt: Prompt) -> str:
    return f"{engine.about.kind} {engine.about.name}: {prompt.name}, {len(prompt.ids)} tokens"


def _save(directory: Path, scores: Logits | TopK) -> None:
    directory.mkdir()
    for name, array in vars(scores).items():
        if array is not None:
            np.save(directory / f"{name}.npy", array)


def _load(directory: Path) -> Logits | TopK:
    """What `_save` wrote, mapped and not read."""
    found = {path.stem: np.load(path, mmap_mode="r") for path in directory.glob("*.npy")}
    return Logits(**found) if "values" in found else TopK(**found)


def _notes(a: Source, b: Source) -> list[str]:
    kinds = [source.about.kind for source in (a, b)]
    if "server" in kinds:
        return [
            "a server tells its likeliest tokens alone: differences are of log probabilities over "
            "those, and KL is a lower bound"
        ]
    return []


def _result(
    a: About,
    b: About,
    comparisons: Sequence[Comparison],
    limits: Limits,
    notes: Sequence[str],
    before: Sequence[Finding],
) -> Result:
    findings = [*before]
    for comparison in comparisons:
        findings += judge(comparison, limits)
    total = worst(comparisons)
    layers = layers_text(comparisons, limits)
    tokens = sum(len(comparison.positions) for comparison in comparisons)
    allowed = f"KL {limits.mean_kl:g}, top-1 {limits.top1:.0%}"
    if limits.max_abs is not None:
        allowed += f", largest difference {limits.max_abs:g}"
    return Result(
        check="logits",
        title=f"{a.name} against {b.name}",
        findings=tuple(findings),
        summary=(
            ("A", _engine_text(a)),
            ("B", _engine_text(b)),
            ("compared", f"{tokens} positions of {len(comparisons)} prompts"),
            ("largest difference", f"{total['max_abs']:.4g}"),
            ("mean KL(A||B)", f"{total['mean_kl']:.3g} in the worst prompt"),
            ("top-1 agreement", f"{total['top1']:.1%} in the worst prompt"),
            *((("hidden states", layers),) if layers else ()),
            ("limits", f"{allowed} ({limits.dtype})"),
        ),
        data={
            "a": _about_json(a),
            "b": _about_json(b),
            "limits": limits.json(),
            "worst": total,
            "prompts": [_prompt_json(comparison, limits) for comparison in comparisons],
        },
        notes=tuple(notes),
    )


def _prompt_json(found: Comparison, limits: Limits) -> dict[str, Any]:
    where = first_diverging(found, limits) if is_diverging(found, limits) else None
    return {**found.json(), "first_diverging": where}


def _engine_text(about: About) -> str:
    merged = ", factors applied" if about.adapted else ""
    return f"{about.name} by {about.kind} in {about.dtype} (stored {about.stored}{merged})"


def _about_json(about: About) -> Mapping[str, Any]:
    return {**asdict(about), "tokenizer": str(about.tokenizer) if about.tokenizer else None}
