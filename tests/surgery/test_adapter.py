"""Finding LoRA factors in a tree, their alpha, and values that would harm or do nothing."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.tensor import Array, ArrayTensor
from gemma_convert.surgery.adapters.adapter import Adapter, Pair, uniform
from gemma_convert.surgery.adapters.qwix import resolve_alpha, split_factors
from gemma_convert.surgery.adapters.values import check_values
from tests.checkpoints import NATIVE, memory

Q = "layers.0.attn.q_einsum.w"


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def adapter(a: Array, b: Array) -> Adapter:
    return uniform({Q: Pair(ArrayTensor(a), ArrayTensor(b))}, 4.0, NATIVE, "run")


def test_factors_are_told_from_weights() -> None:
    gate = "layers.0.mlp.gate_proj.kernel"
    values = {
        f"{Q}_lora_a": ones(5, 2),
        Q: ones(3, 5, 7),
        f"{gate}_lora_b": ones(4, 11),
        f"{Q}_lora_b": ones(2, 3, 7),
        "final_norm.scale": ones(5),
        f"{gate}_lora_a": ones(5, 4),
    }
    weights, pairs = split_factors(memory(values))
    assert list(weights) == [Q, "final_norm.scale"]
    assert {name: pair.rank for name, pair in pairs.items()} == {Q: 2, gate: 4}
    assert pairs[Q].a.shape == (5, 2)
    assert pairs[Q].b.shape == (2, 3, 7)


def test_scale_takes_each_modules_own_rank() -> None:
    pairs = {
        "x": Pair(ArrayTensor(ones(5, 2)), ArrayTensor(ones(2, 3))),
        "y": Pair(ArrayTensor(ones(5, 8)), ArrayTensor(ones(8, 3))),
    }
    found = uniform(pairs, 16.0, NATIVE, "run")
    assert (found.scale("x"), found.scale("y")) == (8.0, 2.0)


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_factor_alone_is_refused(side: str) -> None:
    values = {f"{Q}_lora_{side}": ones(2, 2)}
    other = "b" if side == "a" else "a"
    with pytest.raises(AdapterError, match=f"{Q}_lora_{other} is missing.*incomplete"):
        split_factors(memory(values, source="run"))


@pytest.mark.parametrize(("a", "b"), [((5, 2), (3, 3, 7)), ((5, 2), ()), ((), (2, 3, 7))])
def test_two_ranks_are_refused(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    values = {f"{Q}_lora_a": ones(*a), f"{Q}_lora_b": ones(*b)}
    with pytest.raises(AdapterError) as caught:
        split_factors(memory(values, source="run"))
    assert str(caught.value) == (
        f"run: {Q}: the factors disagree on the rank: A {list(a)} ends in r, "
        f"B {list(b)} begins with r; they belong to different runs"
    )


@pytest.mark.parametrize(
    ("custom", "given", "alpha"),
    [
        ({"lora": {"alpha": 16}}, None, 16.0),
        ({"lora_alpha": 8.5}, None, 8.5),
        ({"alpha": 3}, None, 3.0),
        ({"lora": {"alpha": 16, "rank": 4}}, 16.0, 16.0),
        ({}, 4.0, 4.0),
        (None, 4.0, 4.0),
        ({"lora": "yes"}, 4.0, 4.0),
        ({"lora": {"alpha": None}}, 4.0, 4.0),
    ],
)
def test_alpha(custom: Any, given: float | None, alpha: float) -> None:
    assert resolve_alpha({"custom_metadata": custom}, given, "run") == alpha


@pytest.mark.parametrize("metadata", [{}, {"custom_metadata": {"loss": 0.5}}])
def test_alpha_cannot_be_guessed(metadata: dict[str, Any]) -> None:
    with pytest.raises(AdapterError) as caught:
        resolve_alpha(metadata, None, "run")
    assert str(caught.value) == (
        "run: alpha is not stored in the checkpoint, and it cannot be guessed: the factors give "
        "the rank r, but the scale is alpha / r and any alpha fits them; "
        "pass --alpha with the value of the training run"
    )


def test_alpha_that_disagrees() -> None:
    metadata = {"custom_metadata": {"lora": {"alpha": 16}}}
    with pytest.raises(AdapterError, match="metadata says alpha 16, --alpha says 8"):
        resolve_alpha(metadata, 8.0, "run")


@pytest.mark.parametrize("alpha", [0.0, float("nan"), float("inf")])
def test_alpha_that_is_no_scale(alpha: float) -> None:
    with pytest.raises(AdapterError, match=f"alpha is {alpha:g}; pass a finite value"):
        resolve_alpha({}, alpha, "run")


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values_that_are_not_finite(side: str, bad: float, dtype: Any) -> None:
    factors = {"a": ones(5, 2).astype(dtype), "b": ones(2, 3, 7).astype(dtype)}
    factors[side].reshape(-1)[3:5] = bad
    size = factors[side].size
    message = f"run: {Q}_lora_{side}: 2 of {size} values are NaN or infinite; the run diverged"
    with pytest.raises(AdapterError, match=message):
        check_values(adapter(**factors))


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_pair_that_changes_nothing(side: str) -> None:
    factors = {"a": ones(5, 2), "b": ones(2, 3, 7)}
    factors[side][:] = 0
    with pytest.raises(AdapterError, match=f"{Q}_lora_{side} is all zero: .* changes nothing"):
        check_values(adapter(**factors))


def test_good_values_pass() -> None:
    b = np.zeros((2, 3, 7), np.float32)
    b[1, 2, 6] = -1e-30
    check_values(adapter(ones(5, 2), b))
