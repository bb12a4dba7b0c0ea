"""Adapters that do not fit the base: told before reading, with module and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.random_model import random_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import ArrayTensor
from gemma_convert.surgery.adapters.adapter import Pair, uniform
from gemma_convert.surgery.merge_lora import merge
from tests.checkpoints import F32, GEMMA3, GEMMA4, NATIVE


def plan(config: dict[str, Any], pairs: dict[str, Pair]) -> None:
    adapter = uniform(pairs, 1.0, NATIVE, "run")
    base = random_model(config, Spelling(HF, "model."), F32)
    merge(base, [adapter], read_model(config, families()), Spelling(HF, "model."))


@pytest.mark.parametrize(
    ("config", "module", "message"),
    [
        (GEMMA3, "layers.2.attn.q_einsum.w", r"the base \(gemma3, 2 layers\) has no such module"),
        (GEMMA3, "layers.0.attn.k_einsum.w", "no such module"),
        (GEMMA3, "layers.0.attn.q_einsum.v", "no such module"),
        (GEMMA3, "layers.00.attn.q_einsum.w", "no such module"),
        (GEMMA4, "layers.2.attn.kv_einsum.w", "no such module"),
        (GEMMA3, "final_norm.scale", "no such module"),
        (GEMMA3, "embedder.input_embedding", "no such module"),
    ],
)
def test_a_module_that_the_base_lacks(config: dict[str, Any], module: str, message: str) -> None:
    pair = Pair(ArrayTensor(np.ones((10, 2), F32)), ArrayTensor(np.ones((2, 3), F32)))
    with pytest.raises(AdapterError, match=f"^run: {module}: .*{message}") as caught:
        plan(config, {module: pair})
    assert caught.value.remedy == "give the base that the adapter was trained on"


def test_all_left_over_modules_are_counted() -> None:
    pair = Pair(ArrayTensor(np.ones((10, 2), F32)), ArrayTensor(np.ones((2, 3), F32)))
    pairs = {f"layers.{i}.attn.q_einsum.w": pair for i in (7, 8, 9)}
    with pytest.raises(AdapterError, match=r"nor 2 more that the adapter changes"):
        plan(GEMMA3, pairs)


@pytest.mark.parametrize(
    ("module", "a", "b", "message"),
    [
        (
            "attn.q_einsum.w",
            (9, 2),
            (2, 6, 7),
            r"w_lora_a: expected \(d r\) = \[10, 2\] .*\[9, 2\]",
        ),
        ("attn.q_einsum.w", (10, 2), (2, 7, 6), r"w_lora_b: expected \(r n h\) = \[2, 6, 7\]"),
        ("attn.q_einsum.w", (10, 2), (2, 42), r"w_lora_b: expected \(r n h\) = \[2, 6, 7\]"),
        ("attn.kv_einsum.w", (10, 2), (2, 3, 2, 7), r"expected \(r s k h\) = \[2, 2, 3, 7\]"),
        ("attn.attn_vec_einsum.w", (7, 6, 2), (2, 10), r"expected \(n h r\) = \[6, 7, 2\]"),
        ("mlp.down_proj.kernel", (10, 2), (2, 11), r"expected \(f r\) = \[11, 2\]"),
    ],
)
def test_factors_of_another_width(
    module: str, a: tuple[int, ...], b: tuple[int, ...], message: str
) -> None:
    pair = Pair(ArrayTensor(np.ones(a, F32)), ArrayTensor(np.ones(b, F32)))
    with pytest.raises(AdapterError, match=message):
        plan(GEMMA3, {f"layers.0.{module}": pair})
