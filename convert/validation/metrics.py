"""How two engines' scores of one prompt differ, position by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.validation.engines.base import Logits, TopK

_ROWS = 16
"""Positions that are widened to float64 at a time."""


@dataclass(frozen=True)
class Comparison:
    """Two engines on one prompt; arrays have one value a position.

    Where a side gives only its likeliest tokens, differences are of log probabilities over those,
    and all other tokens count as one: the divergence is then a lower bound (by the data
    processing inequality).

    Attributes:
        prompt: Its name.
        tokens: Its length.
        positions: Those compared.
        max_abs: Largest absolute difference of the scores.
        mean_abs: Mean absolute difference.
        kl: Kullback-Leibler divergence KL(A || B), in nats.
        same_top1: Whether both like the same token best.
        rank: Rank of A's favourite in B, from 1.
        margin: By how much A prefers its favourite to its second.
        nll_a: Negative log likelihood of the prompt's next token by A; NaN where unknown.
        nll_b: By B.
        finite_a: Whether all scores of A are numbers; where not, no number above means anything.
        finite_b: Of B.
        layers: Relative error of the hidden states entering the first layer and leaving each; None
            where a side has none.
    """

    prompt: str
    tokens: int
    positions: Array
    max_abs: Array
    mean_abs: Array
    kl: Array
    same_top1: Array
    rank: Array
    margin: Array
    nll_a: Array
    nll_b: Array
    finite_a: Array
    finite_b: Array
    layers: Array | None = None

    @property
    def top1(self) -> float:
        """Share of positions at which both like the same token best."""
        return float(np.mean(self.same_top1))

    @property
    def lost_margin(self) -> float:
        """The largest preference of A that B does not share."""
        return float(self.margin[~self.same_top1].max(initial=0.0))

    def json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "prompt": self.prompt,
            "tokens": self.tokens,
            "compared": len(self.positions),
            "max_abs": float(self.max_abs.max()),
            "mean_abs": float(self.mean_abs.mean()),
            "mean_kl": float(self.kl.mean()),
            "max_kl": float(self.kl.max()),
            "top1_agreement": self.top1,
            "largest_margin_lost": self.lost_margin,
            "worst_rank": int(self.rank.max()),
            "perplexity_a": perplexity(self.nll_a),
            "perplexity_b": perplexity(self.nll_b),
            "layers": None if self.layers is None else [float(x) for x in self.layers],
            "by_position": {
                "position": [int(p) for p in self.positions],
                "max_abs": [float(x) for x in self.max_abs],
                "mean_abs": [float(x) for x in self.mean_abs],
                "kl": [float(x) for x in self.kl],
                "top1": [bool(x) for x in self.same_top1],
                "rank": [int(x) for x in self.rank],
                "finite": [bool(x) for x in self.finite_a & self.finite_b],
            },
        }


def perplexity(nll: Array) -> float | None:
    """The exponential of the mean; None where no position is known."""
    known = nll[~np.isnan(nll)]
    return float(np.exp(known.mean())) if known.size else None


def compare(
    prompt: str, ids: list[int], keep: list[int], a: Logits | TopK, b: Logits | TopK
) -> Comparison:
    """Compare what two engines gave for the positions ``keep`` of ``ids``."""
    with np.errstate(invalid="ignore"):  # what is not finite is told, see `Comparison.finite_a`
        rows = _full(ids, keep, a, b) if _both_full(a, b) else _partial(ids, keep, a, b)
    table = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    return Comparison(prompt, len(ids), np.array(keep), **table, layers=_layers(a, b))


def _both_full(a: Logits | TopK, b: Logits | TopK) -> bool:
    return isinstance(a, Logits) and isinstance(b, Logits)


def _layers(a: Logits | TopK, b: Logits | TopK) -> Array | None:
    one, other = getattr(a, "hidden", None), getattr(b, "hidden", None)
    if one is None or other is None:
        return None
    if one.shape != other.shape:
        shapes = [f"{x.shape[0] - 1} layers of {x.shape[-1]} values" for x in (one, other)]
        raise InputError(
            f"A has {shapes[0]} and B {shapes[1]}: their hidden states cannot be compared",
            "leave --layers out",
        )
    found = []
    for x, y in zip(one, other, strict=True):
        x, y = x.astype(np.float64), y.astype(np.float64)
        found.append(float(np.linalg.norm(y - x)) / max(float(np.linalg.norm(x)), 1e-30))
    return np.array(found)


def log_softmax(scores: Array) -> Array:
    """Log probabilities along the last axis, in float64."""
    wide = scores.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide


def _full(ids: list[int], keep: list[int], a: Any, b: Any) -> list[dict[str, Any]]:
    size = min(a.values.shape[-1], b.values.shape[-1])  # rows beyond belong to no token
    rows: list[dict[str, Any]] = []
    for start in range(0, len(keep), _ROWS):
        x = np.asarray(a.values[start : start + _ROWS, :size])
        y = np.asarray(b.values[start : start + _ROWS, :size])
        p, q = log_softmax(x), log_softmax(y)
        difference = np.abs(x.astype(np.float64) - y.astype(np.float64))
        kl = np.sum(np.exp(p) * (p - q), -1)
        best, others = p.argmax(-1), np.partition(p, -2, axis=-1)[:, -2:]
        for i in range(len(x)):
            token = _following(ids, keep[start + i])
            rows.append(
                {
                    "max_abs": difference[i].max(),
                    "mean_abs": difference[i].mean(),
                    "kl": np.maximum(0.0, kl[i]),  # which keeps NaN, as max does not
                    "same_top1": bool(best[i] == q[i].argmax()),
                    "rank": 1 + int(np.count_nonzero(q[i] > q[i, best[i]])),
                    "margin": others[i, 1] - others[i, 0],
                    "nll_a": np.nan if token is None or token >= size else -p[i, token],
                    "nll_b": np.nan if token is None or token >= size else -q[i, token],
                    "finite_a": bool(np.isfinite(x[i]).all()),
                    "finite_b": bool(np.isfinite(y[i]).all()),
                }
            )
    return rows


def _partial(
    ids: list[int], keep: list[int], a: Logits | TopK, b: Logits | TopK
) -> list[dict[str, Any]]:
    rows = []
    for i, position in enumerate(keep):
        token = _following(ids, position)
        one, other = _Row(a, i, token), _Row(b, i, token)
        told = [set(row.told) for row in (one, other) if row.told is not None]
        size = min(one.size, other.size)  # rows beyond belong to no token
        shared = sorted(t for t in set.intersection(*told) if t < size)
        p = np.array([one.logprob(t) for t in shared])
        q = np.array([other.logprob(t) for t in shared])
        difference = np.abs(p - q) if shared else np.array([np.inf])
        best, margin = one.favourite
        rows.append(
            {
                "max_abs": difference.max(),
                "mean_abs": difference.mean(),
                "kl": _lumped(p, q),
                "same_top1": best == other.favourite[0],
                "rank": other.rank(best),
                "margin": margin,
                "nll_a": one.nll,
                "nll_b": other.nll,
                "finite_a": one.finite,
                "finite_b": other.finite,
            }
        )
    return rows


def _lumped(p: Array, q: Array) -> float:
    """KL over the tokens given and one more that stands for all others."""
    rest_p, rest_q = (np.maximum(1e-12, 1 - np.exp(x).sum()) for x in (p, q))
    kl = np.sum(np.exp(p) * (p - q)) + rest_p * np.log(rest_p / rest_q)
    return float(np.maximum(0.0, kl))


class _Row:
    """One position of one engine, whether it tells all tokens or the likeliest."""

    def __init__(self, scores: Logits | TopK, i: int, token: int | None) -> None:
        self.told: dict[int, float] | None = None
        self.size: float = np.inf  # a server does not say how many tokens it knows
        if isinstance(scores, TopK):
            pairs = zip(scores.ids[i], scores.logprobs[i], strict=True)
            self.told = {int(t): float(value) for t, value in pairs if t >= 0}
            self.nll = -float(scores.next_logprobs[i])
            self.finite = bool(np.isfinite(list(self.told.values())).all())
        else:
            self.finite = bool(np.isfinite(scores.values[i]).all())
            self.all = log_softmax(np.asarray(scores.values[i]))
            self.size = len(self.all)
            known = token is not None and token < self.size
            self.nll = -float(self.all[token]) if known else np.nan

    def logprob(self, token: int) -> float:
        return float(self.all[token]) if self.told is None else self.told[token]

    @property
    def favourite(self) -> tuple[int, float]:
        """The likeliest token, and by how much it leads."""
        if self.told is None:
            second, first = np.partition(self.all, -2)[-2:]
            return int(self.all.argmax()), float(first - second)
        best = sorted(self.told, key=lambda token: -self.told[token])  # type: ignore[index]
        lead = self.told[best[0]] - self.told[best[1]] if len(best) > 1 else np.inf
        return best[0], float(lead)

    def rank(self, token: int) -> int:
        """Rank of ``token``, one beyond the last told where it is not told or has no score."""
        if self.told is None:
            if token >= self.size:
                return len(self.all) + 1
            return 1 + int(np.count_nonzero(self.all > self.all[token]))
        if token not in self.told:
            return len(self.told) + 1
        return 1 + sum(value > self.told[token] for value in self.told.values())


def _following(ids: list[int], position: int) -> int | None:
    return ids[position + 1] if position + 1 < len(ids) else None


def kept_positions(count: int, most: int) -> list[int]:
    """All positions of a prompt, or of a long one the last and evenly spaced earlier ones."""
    if count <= most:
        return list(range(count))
    last = most // 2
    early = np.linspace(0, count - last - 1, most - last).round().astype(int)
    return [*(int(i) for i in early), *range(count - last, count)]
