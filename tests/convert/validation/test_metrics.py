"""Metrics of logits against scipy in float64, for full scores and for a server's likeliest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import log_softmax, rel_entr, softmax

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.validation.engines.base import About, Logits, TopK
from gemma_convert.convert.validation.metrics import Comparison, compare, kept_positions
from gemma_convert.convert.validation.verdict import (
    FLOAT32,
    ROUNDED,
    Limits,
    Overrides,
    first_diverging,
    judge,
    layers_text,
    limits_for,
    worst,
)

RANDOM = np.random.default_rng(11)
TOKENS, VOCABULARY = 37, 53
IDS = RANDOM.integers(0, VOCABULARY, TOKENS).tolist()
A = RANDOM.normal(0.0, 3.0, (TOKENS, VOCABULARY)).astype(np.float32)
B = (A + RANDOM.normal(0.0, 0.8, A.shape)).astype(np.float32)
KEEP = list(range(TOKENS))


def likeliest(scores: Array, k: int) -> TopK:
    """What a server tells of ``scores``: the best k, and the token that follows."""
    logprobs = log_softmax(scores.astype(np.float64), -1)
    ids = np.argsort(-logprobs, axis=-1)[:, :k]
    after = np.full(TOKENS, np.nan)
    after[:-1] = logprobs[np.arange(TOKENS - 1), IDS[1:]]
    return TopK(ids, np.take_along_axis(logprobs, ids, -1), after)


def full(a: Array = A, b: Array = B) -> Comparison:
    return compare("p", IDS, KEEP, Logits(a), Logits(b))


def test_full_scores() -> None:
    found = full()
    x, y = A.astype(np.float64), B.astype(np.float64)
    np.testing.assert_array_equal(found.max_abs, np.abs(x - y).max(-1))
    np.testing.assert_allclose(found.mean_abs, np.abs(x - y).mean(-1), rtol=1e-13)
    kl = rel_entr(softmax(x, -1), softmax(y, -1)).sum(-1)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-10)
    np.testing.assert_array_equal(found.same_top1, x.argmax(-1) == y.argmax(-1))
    rank = [1 + int((row > row[best]).sum()) for row, best in zip(y, x.argmax(-1), strict=True)]
    np.testing.assert_array_equal(found.rank, rank)
    top = np.sort(x, -1)
    np.testing.assert_allclose(found.margin, top[:, -1] - top[:, -2], rtol=1e-12)
    for scores, nll in ((x, found.nll_a), (y, found.nll_b)):
        expected = -log_softmax(scores, -1)[np.arange(TOKENS - 1), IDS[1:]]
        np.testing.assert_allclose(nll[:-1], expected, rtol=1e-12)
        assert np.isnan(nll[-1])
    told = found.json()
    assert told["perplexity_a"] == pytest.approx(np.exp(np.mean(found.nll_a[:-1])))
    assert told["mean_kl"] == pytest.approx(kl.mean())
    assert 0 < told["top1_agreement"] < 1
    assert found.lost_margin == found.margin[~found.same_top1].max()


def test_some_positions_alone() -> None:
    keep = [0, 5, 36]
    found = compare("p", IDS, keep, Logits(A[keep]), Logits(B[keep]))
    np.testing.assert_array_equal(found.kl, full().kl[keep])
    np.testing.assert_array_equal(found.nll_b[:2], full().nll_b[keep[:2]])


def test_rows_beyond_the_smaller_vocabulary_do_not_count() -> None:
    longer = np.concatenate([B, np.full((TOKENS, 7), 99.0, np.float32)], -1)
    np.testing.assert_array_equal(full(A, longer).kl, full().kl)


@pytest.mark.parametrize("server_first", [False, True])
def test_a_servers_likeliest(server_first: bool) -> None:
    k = 9
    p, q = log_softmax(A.astype(np.float64), -1), log_softmax(B.astype(np.float64), -1)
    pair = (likeliest(A, k), Logits(B)) if server_first else (Logits(A), likeliest(B, k))
    found = compare("p", IDS, KEEP, *pair)
    told = np.argsort(-(p if server_first else q), axis=-1)[:, :k]
    for i in range(TOKENS):
        x, y = p[i, told[i]], q[i, told[i]]
        assert found.max_abs[i] == pytest.approx(np.abs(x - y).max(), rel=1e-10)
        rest = [1 - np.exp(row).sum() for row in (x, y)]
        lumped = rel_entr([*np.exp(x), rest[0]], [*np.exp(y), rest[1]]).sum()
        assert found.kl[i] == pytest.approx(lumped, rel=1e-8, abs=1e-12)
    assert np.all(found.kl <= full().kl + 1e-12)
    np.testing.assert_array_equal(found.same_top1, full().same_top1)
    np.testing.assert_allclose(found.nll_b[:-1], full().nll_b[:-1], rtol=1e-12)
    np.testing.assert_array_equal(
        found.rank, full().rank if server_first else np.minimum(full().rank, k + 1)
    )


def test_two_servers() -> None:
    found = compare("p", IDS, KEEP, likeliest(A, 9), likeliest(A, 9))
    assert found.kl.max() < 1e-12
    assert found.top1 == 1


def test_hidden_states() -> None:
    hidden = RANDOM.normal(size=(4, TOKENS, 6)).astype(np.float32)
    other = hidden.copy()
    other[2:] *= 1.5
    found = compare("p", IDS, KEEP, Logits(A, hidden), Logits(B, other))
    assert found.layers is not None
    np.testing.assert_allclose(found.layers, [0, 0, 0.5, 0.5], rtol=1e-6)
    assert first_diverging(found, FLOAT32) == "layer 1"
    assert full().layers is None


@pytest.mark.parametrize(
    ("from_layer", "said"), [(0, "before the first layer"), (3, "layer 2"), (4, "behind the last")]
)
def test_where_they_part(from_layer: int, said: str) -> None:
    hidden = RANDOM.normal(size=(4, TOKENS, 6))
    other = hidden.copy()
    other[from_layer:] += 1
    found = compare("p", IDS, KEEP, Logits(A, hidden), Logits(B, other))
    assert first_diverging(found, FLOAT32).startswith(said)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["A", "B"])
def test_what_is_not_finite_fails_and_names_the_position(side: str, strange: float) -> None:
    broken = {"A": A.copy(), "B": B.copy()}
    broken[side][[4, 7], 4] = strange
    found = full(broken["A"], broken["B"])
    (finding,) = judge(found, ROUNDED)
    assert finding.what == f"{side} gives NaN or infinite logits at position 4, the first of 2"
    assert not found.finite_a.all() if side == "A" else not found.finite_b.all()
    assert found.kl[3] == full().kl[3]


def test_nan_is_no_kl_of_zero() -> None:
    broken = B.copy()
    broken[4, 4] = np.nan
    found = full(A, broken)
    assert np.isnan(found.kl[4])
    worse = full(A, B + 1)
    for comparisons in ([found, worse], [worse, found]):
        assert np.isnan(worst(comparisons)["mean_kl"])
        assert np.isnan(worst(comparisons)["max_abs"])


def test_a_server_that_says_nan_fails() -> None:
    told = likeliest(B, 9)
    told.logprobs[5, 2] = np.nan
    (finding,) = judge(compare("p", IDS, KEEP, Logits(A), told), ROUNDED)
    assert finding.what == "B gives NaN or infinite logits at position 5, the first of 1"


def test_a_divergence_that_the_logits_hide_is_told() -> None:
    """As the last norm hides a factor of the last layer."""
    hidden = RANDOM.normal(size=(4, TOKENS, 6))
    other = hidden.copy()
    other[3] *= 2
    found = compare("p", IDS, KEEP, Logits(A, hidden), Logits(A, other))
    assert judge(found, FLOAT32) == []
    told = "relative error up to 1, limit 0.0001; the first beyond it: layer 2 (prompt p)"
    assert layers_text([full(), found], FLOAT32) == told
    other[3, 0] = np.nan
    broken = compare("p", IDS, KEEP, Logits(A, hidden), Logits(A, other))
    assert layers_text([found, broken], FLOAT32).endswith("layer 2 (prompt p)")
    same = compare("p", IDS, KEEP, Logits(A, hidden), Logits(A, hidden))
    assert layers_text([same], FLOAT32) == "relative error up to 0, limit 0.0001"
    assert layers_text([full()], FLOAT32) == ""


def test_each_limit_is_told() -> None:
    (finding,) = judge(full(), Limits("x", 0.5, 1e-3, 1.0, 1e-4))
    for part in ("logits differ by", "mean KL", "top-1 agreement"):
        assert part in finding.what
    assert judge(full(), Limits("x", None, 10.0, 0.0, 1e-4)) == []


def test_a_lead_within_the_limit_is_a_tie() -> None:
    a = np.float32([[1.0, 1.0 + 2e-3, 0.0]])
    b = np.float32([[1.0 + 1e-3, 1.0, 0.0]])
    found = compare("p", [0], [0], Logits(a), Logits(b))
    assert found.top1 == 0
    assert judge(found, Limits("x", 2e-3, 1.0, 1.0, 1e-4)) == []
    assert len(judge(found, Limits("x", None, 1.0, 1.0, 1e-4))) == 1


def test_tokens_that_b_likes_equally_are_a_tie() -> None:
    a, b = np.float32([[0.0, 1.0, 0.0]]), np.float32([[1.0, 1.0, 0.0]])
    found = compare("p", [0], [0], Logits(a), Logits(b))
    assert (found.top1, found.rank[0]) == (0, 1)
    assert judge(found, Limits("x", None, 10.0, 1.0, 1e-4)) == []


def engine(dtype: str = "float32", stored: str = "bfloat16", adapted: bool = False) -> About:
    return About("x", "transformers", dtype, stored, adapted)


def test_limits_depend_on_the_dtypes() -> None:
    assert limits_for(engine(), engine()) == FLOAT32
    assert limits_for(engine(), engine("bfloat16")) == ROUNDED
    assert limits_for(engine("bfloat16"), engine()) == ROUNDED
    # factors against a merge: rounded once if stored so
    assert limits_for(engine(adapted=True), engine()) == ROUNDED
    assert limits_for(engine(adapted=True), engine(stored="float32")) == FLOAT32
    assert limits_for(engine(stored="float32"), engine(adapted=True)) == FLOAT32
    assert limits_for(engine(adapted=True), engine(adapted=True)) == FLOAT32
    # the same weights, one side rounded
    assert limits_for(engine(stored="float32"), engine()) == ROUNDED
    # a server that computes in float32 does not say how it stores
    server = replace(engine(stored="float32"), kind="server")
    assert limits_for(engine(), server) == FLOAT32


def test_limits_can_be_set() -> None:
    found = limits_for(engine(), engine(), Overrides(mean_kl=0.5, top1=0.0))
    assert (found.max_abs, found.mean_kl, found.top1) == (FLOAT32.max_abs, 0.5, 0.0)


@pytest.mark.parametrize(("count", "most"), [(5, 8), (8, 8), (9, 8), (700, 8), (2048, 512)])
def test_kept_positions(count: int, most: int) -> None:
    keep = kept_positions(count, most)
    assert len(keep) == len(set(keep)) == min(count, most)
    assert keep == sorted(keep)
    assert (keep[0], keep[-1]) == (0, count - 1)


def test_models_of_other_depths_have_no_layers_to_compare() -> None:
    hidden = RANDOM.normal(size=(4, TOKENS, 6))
    with pytest.raises(InputError) as caught:
        compare("p", IDS, KEEP, Logits(A, hidden), Logits(B, hidden[:3, :, :5]))
    assert str(caught.value) == (
        "A has 3 layers of 6 values and B 2 layers of 5 values: their hidden states cannot be "
        "compared; leave --layers out"
    )


def test_a_token_without_a_score_has_no_likelihood() -> None:
    found = compare("p", IDS, KEEP, Logits(A[:, :20]), likeliest(B, 9))
    unknown = [token >= 20 for token in IDS[1:]]
    assert 0 < sum(unknown) < len(unknown)
    np.testing.assert_array_equal(np.isnan(found.nll_a[:-1]), unknown)
