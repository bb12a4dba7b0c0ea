"""The delta of a LoRA pair and its sum with a weight, against einsums written by hand."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.layouts import TUNIX
from gemma_convert.convert.model import read_model
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array, ArrayTensor, Box, Tensor, blocks, slices, whole
from gemma_convert.surgery.adapters.adapter import Pair
from gemma_convert.surgery.delta import Dora, LowRank, Merged, Survival
from gemma_convert.surgery.quantise import Scales
from tests.checkpoints import BF16, CONFIGS, F32, RANK, factor_arrays
from tests.lora_oracle import EINSUMS

SCALE = 2.5
UNIT = 2.0**-24
"""Rounding error of one float32 operation, relative."""

MODELS = {**CONFIGS, "gemma3-full": {**CONFIGS["gemma3"], "num_key_value_heads": 6}}

MODULES = [
    (family, layer, module)
    for family, layer, missing in (
        ("gemma3", 1, {"attn.k_einsum.w", "attn.qkv_einsum.w"}),
        ("gemma3-full", 1, {"attn.k_einsum.w", "attn.q_einsum.w", "attn.kv_einsum.w"}),
        ("gemma4", 0, {"attn.k_einsum.w", "attn.qkv_einsum.w"}),
        ("gemma4", 2, {"attn.kv_einsum.w", "attn.qkv_einsum.w"}),
    )
    for module in EINSUMS
    if module not in missing
]


def low_rank(family: str, name: str, factors: dict[str, Array]) -> LowRank:
    pair = Pair(*(ArrayTensor(factors[f"{name}_lora_{side}"]) for side in "ab"))
    return LowRank(parameter(family, name), TUNIX, pair, SCALE)


def parameter(family: str, name: str) -> Parameter:
    found = [
        parameter
        for parameter in read_model(MODELS[family], families()).parameters()
        for short, _ in parameter.parts(TUNIX)
        if short == name
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("family", "layer", "module"), MODULES)
def test_law_of_each_module(family: str, layer: int, module: str, dtype: np.dtype[Any]) -> None:
    name = f"layers.{layer}.{module}"
    factors = factor_arrays(MODELS[family], dtype)
    a, b = (factors[f"{name}_lora_{side}"].astype(np.float64) for side in "ab")
    assert RANK >= 2
    assert b.all()
    expected = SCALE * np.einsum(EINSUMS[module], a, b)
    delta = low_rank(family, name, factors)
    assert delta.shape == expected.shape
    assert delta.dtype == F32
    # One rounding for each of the r products and r - 1 sums, and one for the scale.
    bound = 2 * RANK * UNIT * SCALE * np.einsum(EINSUMS[module], np.abs(a), np.abs(b))
    assert (np.abs(delta.numpy() - expected) <= bound).all()


@pytest.mark.parametrize(("family", "layer", "module"), MODULES)
@pytest.mark.parametrize("block_bytes", [4, 100, 1000])
def test_blocks_join_to_the_whole(family: str, layer: int, module: str, block_bytes: int) -> None:
    """Factors of small whole numbers: no rounding, so that any difference is a wrong index."""
    name = f"layers.{layer}.{module}"
    factors = {
        key: np.rint(40 * array).astype(F32)
        for key, array in factor_arrays(MODELS[family], F32).items()
    }
    delta = low_rank(family, name, factors)
    expected = delta.numpy()
    for box in blocks(delta, block_bytes):
        assert np.array_equal(delta.read(box), expected[slices(box)])


def test_key_and_value_take_their_own_half_of_b() -> None:
    """F05, small enough to check by hand: k takes B[:, 0], v takes B[:, 1], both the same A."""
    config = {
        "model_type": "gemma3_text",
        "vocab_size": 3,
        "hidden_size": 5,
        "intermediate_size": 7,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 3,
    }
    a = np.arange(10, dtype=F32).reshape(5, 2)
    b = np.arange(24, dtype=F32).reshape(2, 2, 2, 3) - 7
    found = [
        p
        for p in read_model(config, families()).parameters()
        if p.parts(TUNIX)[0][0] == "layers.0.attn.kv_einsum.w"
    ]
    delta = LowRank(found[0], TUNIX, Pair(ArrayTensor(a), ArrayTensor(b)), 4.0 / 2).numpy()
    for half in (0, 1):
        expected = 2 * (a @ b[:, half].reshape(2, 6)).T
        assert np.array_equal(delta[half].transpose(0, 2, 1).reshape(6, 5), expected)
    assert not np.array_equal(delta[0], delta[1])


def constant(value: float, dtype: np.dtype[Any] = F32) -> ArrayTensor:
    return ArrayTensor(np.full((1, 1), value, dtype))


@pytest.mark.parametrize(
    ("weight", "added"), [(1.0, (0.00391,)), (1.0, (0.003, 0.003, 0.003)), (0.0, (1, 0.003, 0.003))]
)
def test_deltas_are_summed_before_the_one_rounding(weight: float, added: tuple[float, ...]) -> None:
    """F16: rounding each sum to bfloat16, whose next value is 1.0078125, would give 1.0."""
    tensor = Merged(constant(weight, BF16), tuple(map(constant, added)), BF16)
    assert tensor.numpy() == ml_dtypes.bfloat16(1.0078125)


@pytest.mark.parametrize(
    ("delta", "expected"), [(2.0**-8, 1.0), (3 * 2.0**-8, 1.015625), (-(2.0**-9), 1.0)]
)
def test_ties_go_to_even(delta: float, expected: float) -> None:
    assert Merged(constant(1.0, BF16), (constant(delta),), BF16).numpy() == expected


def test_a_wider_output_is_not_rounded_to_the_weights_dtype_first() -> None:
    tensor = Merged(constant(1.0, BF16), (constant(2.0**-20),), F32)
    assert tensor.numpy() == 1 + 2.0**-20


def test_float64_weights_keep_their_precision() -> None:
    double = np.dtype(np.float64)
    weight = 1 + 2.0**-40
    assert Merged(constant(weight, double), (constant(0.5),), double).numpy() == weight + 0.5


def test_survival_adds_up_over_blocks() -> None:
    """Against the definition, on all values at once."""
    random = np.random.default_rng(3)
    weight = random.normal(size=(7, 5)).astype(BF16)
    delta = random.normal(0, 0.003, (7, 5)).astype(F32)
    tensor = Merged(ArrayTensor(weight), (ArrayTensor(delta),), BF16)
    assert tensor.survival == Survival()
    stored = np.concatenate([tensor.read(box).ravel() for box in blocks(tensor, 20)]).reshape(7, 5)
    realised = stored.astype(np.float64) - weight.astype(np.float64)
    assert 0 < np.count_nonzero(realised) < 35
    assert tensor.survival.changed == np.count_nonzero(realised)
    assert tensor.survival.size == 35
    error = np.linalg.norm(realised - delta) / np.linalg.norm(delta.astype(np.float64))
    assert tensor.survival.relative_error == pytest.approx(error, rel=1e-5)  # float32 sums


def test_reading_a_block_twice_does_not_count_it_twice() -> None:
    tensor = Merged(constant(1.0), (constant(0.5),), F32)
    for _ in range(2):
        tensor.read(whole(tensor.shape))
    assert tensor.survival == Survival(delta=0.25, error=0.0, changed=1, size=1)
    assert tensor.survival.relative_error == 0


def test_a_delta_that_vanishes_is_a_total_loss() -> None:
    tensor = Merged(constant(1.0, BF16), (constant(0.001),), BF16)
    tensor.numpy()
    assert tensor.survival.changed == 0
    assert tensor.survival.relative_error == 1


class _Counted(ArrayTensor):
    """A weight that counts how often it is read, each time long enough to be met by others."""

    reads = 0

    def read(self, box: Box) -> Array:
        self.reads += 1
        time.sleep(0.01)
        return super().read(box)


@pytest.mark.parametrize("kind", ["dora", "scales"])
def test_what_needs_all_of_a_weight_reads_it_once_for_all_threads(kind: str) -> None:
    values = np.random.default_rng(3).normal(size=(7, 5)).astype(np.float32)
    weight = _Counted(values)
    if kind == "dora":
        one = ArrayTensor(np.ones(7, np.float32))
        tensor: Tensor = Dora(weight, ArrayTensor(0 * values), one, 1)
        box = ((0, 7), (0, 5))
    else:
        tensor, box = Scales(weight, "int8", [7, 1]), ((0, 1), (0, 5))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tensor.read, [box] * 8))
    assert all(np.array_equal(array, found[0]) for array in found)
    assert weight.reads == (1 + 8 if kind == "dora" else 1)  # the norms, then W itself
