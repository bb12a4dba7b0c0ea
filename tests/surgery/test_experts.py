"""Expert factors as PEFT flattens them, and gate and up in one array; by hand, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array, blocks, slices
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.peft import read_peft
from gemma_convert.surgery.merge_lora import deltas
from tests.checkpoints import F32
from tests.peft_files import in_memory

E, H, R = 2, 8, 2
GATE_UP = "layers.0.experts.gate_up_proj"
DOWN = "layers.0.experts.down_proj"
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def model(width: int = 3) -> Model:
    config = {
        "model_type": "gemma4_text",
        "vocab_size": 23,
        "hidden_size": H,
        "intermediate_size": 11,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 7,
        "global_head_dim": 7,
        "enable_moe_block": True,
        "num_experts": E,
        "moe_intermediate_size": width,
        "hidden_size_per_layer_input": 0,
    }
    return read_model(config, families())


def factors(a: tuple[int, int], b: tuple[int, int], seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    return random.normal(size=a).astype(F32), random.normal(size=b).astype(F32)


def adapter(a: Array, b: Array, targets: list[str] = TARGETS[:1], **config: Any) -> Adapter:
    stem = "base_model.model.model.layers.0.experts"
    values = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    return read_peft(in_memory(values, target_parameters=targets, **config))


def delta(found: Adapter, base: Model, name: str = GATE_UP) -> Array:
    return deltas(found, base, Spelling(HF, ""))[name].numpy()


@pytest.mark.parametrize("version", [{}, {"peft_version": "0.19.1"}, {"peft_version": "0.21.2"}])
def test_factors_since_019(version: dict[str, str]) -> None:
    """F09: A (r e) by in; B out by (r e), the experts innermost there and outermost here."""
    a, b = factors((R * E, H), (6, R * E))
    expected = 2.5 * np.einsum("ore,eri->eoi", b.reshape(6, R, E), a.reshape(E, R, H), dtype=float)
    found = delta(adapter(a, b, **version), model())
    assert np.allclose(found, expected, rtol=0, atol=1e-5)  # |delta| < 30, four float32 sums


@pytest.mark.parametrize(
    "version", [{}, {"peft_version": "0.18.1"}, {"peft_version": "0.18.0.dev"}]
)
def test_factors_until_018(version: dict[str, str]) -> None:
    """F09: the same with inputs and outputs exchanged."""
    a, b = factors((R * E, 6), (H, R * E))
    expected = 2.5 * np.einsum("ore,eri->eio", b.reshape(H, R, E), a.reshape(E, R, 6), dtype=float)
    found = delta(adapter(a, b, **version), model())
    assert np.allclose(found, expected, rtol=0, atol=1e-5)


def test_where_both_fit_the_version_decides() -> None:
    """H = 2 I."""
    a, b = factors((R * E, H), (H, R * E))
    with pytest.raises(AdapterError, match="the factors fit both as PEFT writes them since"):
        delta(adapter(a, b), model(4))
    new = delta(adapter(a, b, peft_version="0.19.0"), model(4))
    old = delta(adapter(a, b, peft_version="0.17.1"), model(4))
    assert np.array_equal(new, old.transpose(0, 2, 1))
    assert not np.allclose(new, old)


def test_a_version_that_the_shapes_contradict() -> None:
    a, b = factors((R * E, H), (6, R * E))
    message = r"gate_up_proj_lora_a: expected \(\(e r\) \(c m\)\) = \[4, 6\] .*found \[4, 8\]"
    with pytest.raises(AdapterError, match=message):
        delta(adapter(a, b, peft_version="0.18.0"), model())


def test_another_number_of_experts() -> None:
    a, b = factors((R * 3, H), (6, R * 3))
    with pytest.raises(AdapterError, match="factors for 3 experts of rank 2, this base has 2"):
        delta(adapter(a, b), model())


def test_two_parameters_are_told_apart_by_nesting() -> None:
    stem = "base_model.model.model.layers.0.experts"
    outer, inner = factors((R * E, 3), (H, R * E)), factors((R * E, H), (6, R * E), 1)
    values = {f"{stem}.lora_A.weight": outer[0], f"{stem}.lora_B.weight": outer[1]}
    values |= {
        f"{stem}.base_layer.lora_A.weight": inner[0],
        f"{stem}.base_layer.lora_B.weight": inner[1],
    }
    found = read_peft(in_memory(values, target_parameters=TARGETS))
    assert found.pairs[GATE_UP].a.shape == (R * E, H)
    assert found.pairs[DOWN].a.shape == (R * E, 3)
    with pytest.raises(
        AdapterError, match=r"factors of 2 parameters, but .* names 1: gate_up_proj"
    ):
        read_peft(in_memory(values, target_parameters=TARGETS[:1]))


def test_gate_and_up_keep_their_rows() -> None:
    """F10: a delta of 1 for the gate and of 2 for up."""
    a = np.zeros((R * E, H), F32)
    a.reshape(E, R, H)[:, 0] = 1
    b = np.zeros((6, R * E), F32)
    b.reshape(6, R, E)[:3, 0], b.reshape(6, R, E)[3:, 0] = 1, 2
    found = delta(adapter(a, b, lora_alpha=2), model())
    assert (found[:, :3] == 1).all()
    assert (found[:, 3:] == 2).all()


@pytest.mark.parametrize("block_bytes", [4, 60, 500])
def test_blocks_join_to_the_whole(block_bytes: int) -> None:
    """Small whole numbers, so that any difference is a wrong index."""
    a, b = (np.rint(5 * factor) for factor in factors((R * E, H), (6, R * E)))
    tensor = deltas(adapter(a, b, lora_alpha=2), model(), Spelling(HF, ""))[GATE_UP]
    expected = tensor.numpy()
    for box in blocks(tensor, block_bytes):
        assert np.array_equal(tensor.read(box), expected[slices(box)])
