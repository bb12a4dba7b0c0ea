"""When two engines count as the same: limits that depend on the dtypes, and where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from gemma_convert.convert.validation.engines.base import About
from gemma_convert.convert.validation.metrics import Comparison
from gemma_convert.convert.validation.result import Finding


@dataclass(frozen=True)
class Limits:
    """What a comparison may show at most.

    Attributes:
        dtype: What they are for.
        max_abs: Largest difference of any logit; None for no limit.
        mean_kl: Mean divergence over a prompt's positions, in nats.
        top1: Least share of positions at which B likes no token better than A's favourite. Where
            ``max_abs`` is limited, a lead of A's below twice that is a tie.
        layer: Relative error of hidden states from which a layer counts as diverging.
    """

    dtype: str
    max_abs: float | None
    mean_kl: float
    top1: float
    layer: float

    def json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


# docs/numerics.md has the measurements behind these.
FLOAT32 = Limits("float32", max_abs=2e-3, mean_kl=1e-6, top1=1.0, layer=1e-4)
ROUNDED = Limits("bfloat16", max_abs=None, mean_kl=1e-2, top1=0.95, layer=0.1)


@dataclass(frozen=True)
class Overrides:
    """Limits that a user sets; None for those that stay."""

    max_abs: float | None = None
    mean_kl: float | None = None
    top1: float | None = None


NO_OVERRIDES = Overrides()


def limits_for(a: About, b: About, overrides: Overrides = NO_OVERRIDES) -> Limits:
    """The limits for two engines.

    They are those of float32 if both compute in it and their weights are the same numbers. Where
    one applies LoRA factors that the other has merged and stored in a narrower dtype, or where they
    store in different dtypes, the weights differ by a rounding, as they do where one computes in a
    narrower dtype.

    Args:
        a: The one.
        b: The other.
        overrides: Limits to replace.
    """
    computes_wide = all(about.dtype in ("float32", "float64") for about in (a, b))
    rounded = a.adapted != b.adapted and "float32" not in (b if a.adapted else a).stored
    known = "server" not in (a.kind, b.kind)  # a server tells no more than how it computes
    rounded |= known and a.adapted == b.adapted and a.stored != b.stored
    limits = FLOAT32 if computes_wide and not rounded else ROUNDED
    return replace(
        limits,
        max_abs=limits.max_abs if overrides.max_abs is None else overrides.max_abs,
        mean_kl=limits.mean_kl if overrides.mean_kl is None else overrides.mean_kl,
        top1=limits.top1 if overrides.top1 is None else overrides.top1,
    )


def judge(found: Comparison, limits: Limits) -> list[Finding]:
    """What is beyond the limits in one prompt, and the layer from which on it is."""
    problems = _not_finite(found) or _beyond(found, limits)
    if not problems:
        return []
    where = f"prompt {found.prompt}"
    layer = first_diverging(found, limits)
    if layer:
        where += f", {layer}"
    return [Finding(where, "; ".join(problems))]


def _not_finite(found: Comparison) -> list[str]:
    """Which side gives scores that are no numbers, and where first: nothing else counts then."""
    problems = []
    for side, finite in (("A", found.finite_a), ("B", found.finite_b)):
        if not finite.all():
            first = int(found.positions[int(finite.argmin())])
            count = int(np.count_nonzero(~finite))
            problems.append(
                f"{side} gives NaN or infinite logits at position {first}, the first of {count}"
            )
    return problems


def _beyond(found: Comparison, limits: Limits) -> list[str]:
    problems = []
    largest = float(found.max_abs.max())
    if not np.isfinite(largest) or (limits.max_abs is not None and largest > limits.max_abs):
        position = int(found.positions[int(found.max_abs.argmax())])
        problems.append(
            f"logits differ by {largest:.4g} at position {position}, "
            f"more than {limits.max_abs if limits.max_abs is not None else 'any number'}"
        )
    mean_kl = float(found.kl.mean())
    if not mean_kl <= limits.mean_kl:
        problems.append(f"mean KL {mean_kl:.3g}, more than {limits.mean_kl:g}")
    top1 = _agreement(found, limits)
    if top1 < limits.top1:
        problems.append(f"top-1 agreement {top1:.1%}, less than {limits.top1:.0%}")
    return problems


def _agreement(found: Comparison, limits: Limits) -> float:
    tie = 2 * limits.max_abs if limits.max_abs is not None else 0.0
    # rank 1 and another favourite: B likes several tokens equally, as bfloat16 logits often do
    return float(np.mean(found.same_top1 | (found.rank == 1) | (found.margin < tie)))


def first_diverging(found: Comparison, limits: Limits) -> str:
    """The first place at which the hidden states differ; empty where they are not known."""
    if found.layers is None:
        return ""
    beyond = np.flatnonzero(~(found.layers <= limits.layer))
    if not beyond.size:
        return "behind the last layer"
    first = int(beyond[0])
    return "before the first layer" if first == 0 else f"layer {first - 1}"


def is_diverging(found: Comparison, limits: Limits) -> bool:
    """Whether hidden states are known and somewhere beyond the limit."""
    return found.layers is not None and not bool(np.all(found.layers <= limits.layer))


def layers_text(comparisons: Sequence[Comparison], limits: Limits) -> str:
    """How far the hidden states are apart, in the worst prompt; empty where they are not known.

    They may be, where the logits are not: the last norm takes a factor away.
    """
    known = [c for c in comparisons if c.layers is not None]
    if not known:
        return ""
    errors = [np.nan_to_num(np.asarray(c.layers), nan=np.inf) for c in known]
    found = known[int(np.argmax([error.max() for error in errors]))]
    error = np.asarray(found.layers)
    told = f"relative error up to {error.max():.3g}, limit {limits.layer:g}"
    if not is_diverging(found, limits):
        return told
    return f"{told}; the first beyond it: {first_diverging(found, limits)} (prompt {found.prompt})"


def worst(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """The worst of all prompts."""
    return {
        "max_abs": float(np.max([c.max_abs.max() for c in comparisons])),
        "mean_kl": float(np.max([c.kl.mean() for c in comparisons])),
        "top1": min(c.top1 for c in comparisons),
    }
