"""Merging adapters into Hugging Face weights, against the float64 oracle of `tests.lora_oracle`."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array, ArrayTensor
from gemma_convert.surgery.adapters.adapter import Adapter, Pair, uniform
from gemma_convert.surgery.adapters.qwix import split_factors
from gemma_convert.surgery.merge_lora import merge
from tests import lora_oracle
from tests.checkpoints import (
    ALPHA,
    BF16,
    CONFIGS,
    F32,
    GEMMA3,
    GEMMA4,
    NATIVE,
    PREFIXES,
    RANK,
    USUAL_PREFIX,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    memory,
)

UNIT = 2.0**-24
"""Rounding error of one float32 operation, relative."""


def adapter(factors: dict[str, Array], alpha: float = ALPHA) -> Adapter:
    _, pairs = split_factors(memory(factors))
    return uniform(pairs, alpha, NATIVE, "run")


def merged(
    config: dict[str, Any],
    base: dict[str, Array],
    prefix: str,
    *adapters: Adapter,
    dtype: np.dtype[Any] | None = None,
) -> dict[str, Array]:
    model = read_model(config, families())
    return arrays(merge(memory(base), list(adapters), model, Spelling(HF, prefix), dtype))


def error_bound(base: Array, factors: dict[str, Array], name: str) -> Array:
    """How far float32 may be from exact: r products, r - 1 sums, scale (twice), and the sum."""
    spread = lora_oracle.deltas(factors, ALPHA, absolute=True)[name]
    bound: Array = UNIT * (np.abs(base.astype(np.float64)) + (2 * RANK + 3) * spread)
    return bound


@pytest.mark.parametrize("family", CONFIGS)
def test_float32_is_the_float64_value_up_to_its_own_rounding(family: str) -> None:
    prefix, config = USUAL_PREFIX[family], CONFIGS[family]
    base, factors = base_arrays(config, prefix, F32), factor_arrays(config, F32)
    found = merged(config, base, prefix, adapter(factors))
    expected = lora_oracle.merged(base, prefix, factors, ALPHA)
    for name in lora_oracle.deltas(factors, ALPHA):
        value, exact = found[prefix + name], expected[prefix + name]
        assert value.dtype == F32
        assert not np.allclose(value, base[prefix + name], atol=1e-3), name
        bound = error_bound(base[prefix + name], factors, name) + UNIT * np.abs(exact)
        assert (np.abs(value - exact) <= bound).all(), name


@pytest.mark.parametrize("family", CONFIGS)
def test_bfloat16_is_the_float64_value_rounded_once(family: str) -> None:
    """Equal wherever float32's own error cannot carry a value across a rounding tie.

    That can happen only within `error_bound` of the middle between two bfloat16 values, where
    both neighbours are allowed; here it is less than one weight in a thousand.
    """
    prefix, config = USUAL_PREFIX[family], CONFIGS[family]
    base, factors = base_arrays(config, prefix, seed=3), factor_arrays(config)
    found = merged(config, base, prefix, adapter(factors))
    expected = lora_oracle.merged(base, prefix, factors, ALPHA)
    doubtful = total = 0
    for name in lora_oracle.deltas(factors, ALPHA):
        value, exact = found[prefix + name], expected[prefix + name]
        bound = error_bound(base[prefix + name], factors, name)
        low, high = (lora_oracle.rounded_to_bfloat16(exact + sign * bound) for sign in (-1, 1))
        assert value.dtype == BF16
        assert ((low <= value) & (value <= high)).all(), name
        doubtful += np.count_nonzero(low != high)
        total += value.size
    assert doubtful < total / 1000


@pytest.mark.parametrize("family", CONFIGS)
def test_where_float32_is_exact_so_is_bfloat16(family: str) -> None:
    """Factors and weights of a few bits: no tolerance, ties to even included."""
    prefix, config = USUAL_PREFIX[family], CONFIGS[family]
    base = base_arrays(config, prefix)
    factors = {
        name: (np.rint(60 * array.astype(F32)) / 64).astype(BF16)
        for name, array in factor_arrays(config).items()
    }
    base = {name: (np.rint(128 * a.astype(F32)) / 128).astype(BF16) for name, a in base.items()}
    found = merged(config, base, prefix, adapter(factors, alpha=2.0))
    expected = lora_oracle.merged(base, prefix, factors, 2.0)
    assert_same_bits(
        found,
        {
            name: lora_oracle.rounded_to_bfloat16(array) if array.dtype == np.float64 else array
            for name, array in expected.items()
        },
    )


def test_a_dtype_is_rounded_to_once() -> None:
    """float32 from a bfloat16 base: the float32 values of the oracle, not those of bfloat16."""
    base, factors = base_arrays(GEMMA3, "model."), factor_arrays(GEMMA3)
    found = merged(GEMMA3, base, "model.", adapter(factors), dtype=F32)
    expected = lora_oracle.merged(base, "model.", factors, ALPHA)
    name = "layers.1.mlp.up_proj.weight"
    value, exact = found[f"model.{name}"], expected[f"model.{name}"]
    assert value.dtype == F32
    bound = error_bound(base[f"model.{name}"], factors, name) + UNIT * np.abs(exact)
    assert (np.abs(value - exact) <= bound).all()
    assert np.count_nonzero(value != value.astype(BF16).astype(F32)) > value.size / 2


@pytest.mark.parametrize("family", CONFIGS)
def test_the_three_prefixes_give_the_same_values(family: str) -> None:
    config, factors = CONFIGS[family], factor_arrays(CONFIGS[family])
    results = []
    for prefix in PREFIXES:
        found = merged(config, base_arrays(config, prefix), prefix, adapter(factors))
        assert all(name.startswith(prefix) for name in found)
        results.append({name.removeprefix(prefix): array for name, array in found.items()})
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize(("ours", "theirs"), [*itertools.product(PREFIXES, repeat=2)])
def test_an_adapter_under_any_prefix_fits_a_base_under_any_other(ours: str, theirs: str) -> None:
    """F08: nine equal results."""
    name = "layers.0.mlp.gate_proj.weight"
    random = np.random.default_rng(5)
    a, b = random.normal(size=(10, 2)).astype(F32), random.normal(size=(2, 11)).astype(F32)
    pair = Pair(ArrayTensor(a), ArrayTensor(b))
    there = uniform({theirs + name: pair}, ALPHA, Spelling(HF, theirs), "run")
    base = base_arrays(GEMMA3, ours, F32)
    found = merged(GEMMA3, base, ours, there)
    expected = base[ours + name] + ALPHA / 2 * (a @ b).T
    assert np.allclose(found.pop(ours + name), expected, rtol=0, atol=1e-6)  # |delta| < 10
    del base[ours + name]
    assert_same_bits(found, base)


def test_several_adapters_are_summed_before_the_one_rounding() -> None:
    """F16: one of 0.00391, or three of 0.003, on 1.0 in bfloat16 give 1.0078125 both times."""
    config = {**GEMMA3, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    base = base_arrays(config, "model.")
    base["model.layers.0.mlp.up_proj.weight"][:] = 1.0

    def small(value: float) -> Adapter:
        a, b = np.full((10, 2), 1, F32), np.full((2, 11), value, F32)
        stem = "layers.0.mlp.up_proj.kernel_lora_"
        return adapter({f"{stem}a": a, f"{stem}b": b}, alpha=1.0)

    for adapters in ((small(0.00391),), (small(0.003),) * 3):
        found = merged(config, base, "model.", *adapters)["model.layers.0.mlp.up_proj.weight"]
        assert (found == ml_dtypes.bfloat16(1.0078125)).all()


def test_key_of_a_layer_whose_value_is_the_key() -> None:
    """F11: k_proj alone carries the delta, and no v_proj is invented."""
    prefix = USUAL_PREFIX["gemma4"]
    base = base_arrays(GEMMA4, prefix)
    factors = {n: a for n, a in factor_arrays(GEMMA4).items() if ".k_einsum." in n}
    assert list(factors) == [f"layers.2.attn.k_einsum.w_lora_{side}" for side in "ab"]
    found = merged(GEMMA4, base, prefix, adapter(factors))
    assert f"{prefix}layers.2.self_attn.v_proj.weight" not in found
    name = f"{prefix}layers.2.self_attn.k_proj.weight"
    exact = lora_oracle.merged(base, prefix, factors, ALPHA)[name]
    assert np.array_equal(found.pop(name), lora_oracle.rounded_to_bfloat16(exact))
    del base[name]
    assert_same_bits(found, base)


def test_what_has_no_pair_is_carried_bit_for_bit() -> None:
    """F12: scalars and norms off one, down to payloads of NaN that arithmetic would lose."""
    prefix = USUAL_PREFIX["gemma4"]
    base = base_arrays(GEMMA4, prefix)
    for layer, value in enumerate((0.3, 0.7, 1.7)):
        base[f"{prefix}layers.{layer}.layer_scalar"][:] = value
    base[f"{prefix}norm.weight"][:2] = np.array([0x7FC1, 0xFF81], np.uint16).view(BF16)
    factors = factor_arrays(GEMMA4)
    changed = {prefix + name for name in lora_oracle.deltas(factors, ALPHA)}
    found = merged(GEMMA4, base, prefix, adapter(factors))
    assert len(changed) == 7 + 7 + 6
    assert_same_bits(
        {name: array for name, array in found.items() if name not in changed},
        {name: array for name, array in base.items() if name not in changed},
    )
    assert all(found[name].tobytes() != base[name].tobytes() for name in changed)


def test_nothing_is_read_before_a_block_is_asked_for() -> None:
    class Untouchable(ArrayTensor):
        def read(self, box: Any) -> Array:
            raise AssertionError("read while planning")

    base = {n: Untouchable(a) for n, a in base_arrays(GEMMA3, "model.").items()}
    _, pairs = split_factors(memory(factor_arrays(GEMMA3)))
    pairs = {n: Pair(Untouchable(np.ones(p.a.shape, F32)), p.b) for n, p in pairs.items()}
    model = read_model(GEMMA3, families())
    found = merge(
        Checkpoint(base), [uniform(pairs, 1.0, NATIVE, "run")], model, Spelling(HF, "model.")
    )
    assert found.keys() == base.keys()
