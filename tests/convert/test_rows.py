"""Each row against the same mapping written out in numpy (tests/layout_law.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.layouts import DEEPMIND, HF, LAYOUTS, TUNIX, Layout, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.rows import row
from tests import layout_law as law
from tests.checkpoints import (
    CONFIGS,
    NATIVE,
    PREFIXES,
    arrays,
    assert_same_bits,
    base_arrays,
    memory,
)


def text_configs() -> dict[str, dict[str, Any]]:
    """Every kind of layer of every family, at distinct sizes."""
    gemma3, gemma4 = CONFIGS["gemma3"], CONFIGS["gemma4"]["text_config"]
    gemma1 = {**gemma3, "model_type": "gemma"}
    gemma2 = {**gemma3, "model_type": "gemma2"}
    return {
        "gemma1-mqa": {**gemma1, "num_key_value_heads": 1},
        "gemma1-mha": {**gemma1, "num_key_value_heads": 6},
        "gemma2": gemma2,
        "gemma2-2b": {**gemma2, "hidden_size": 2304},
        "gemma2-mha": {**gemma2, "num_key_value_heads": 6},
        "gemma3": gemma3,
        "gemma3-mqa": {**gemma3, "num_key_value_heads": 1},
        "gemma3-mha": {**gemma3, "num_key_value_heads": 6},
        "gemma4": gemma4,
        "gemma4-with-values": {**gemma4, "attention_k_eq_v": False},
        "gemma4-mha": {**gemma4, "num_key_value_heads": 6},
        "gemma4-unified": {
            **gemma4,
            "model_type": "gemma4_unified_text",
            "num_global_key_value_heads": 1,
        },
        "gemma4-moe": {
            **gemma4,
            "enable_moe_block": True,
            "num_experts": 5,
            "moe_intermediate_size": 17,
        },
        "gemma4-per-layer": {
            **gemma4,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 5,
            "vocab_size_per_layer_input": 19,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    }


@pytest.mark.parametrize("layout", [TUNIX, DEEPMIND], ids=lambda layout: layout.name)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", text_configs())
def test_rows_keep_the_law_both_ways(kind: str, prefix: str, layout: Layout) -> None:
    """To a JAX layout as the law says, and back to the bits it came from; bfloat16."""
    config = text_configs()[kind]
    model = read_model(config, families())
    values = base_arrays(config, prefix)
    lawful = law.by_law(values, prefix, config, layout.name)
    ours, theirs = Spelling(HF, prefix), Spelling(layout, "")
    assert_same_bits(arrays(relayout(memory(values), model, ours, theirs)), lawful)
    assert_same_bits(arrays(relayout(memory(lawful), model, theirs, ours)), values)


@pytest.mark.parametrize("kind", text_configs())
def test_between_the_jax_layouts(kind: str) -> None:
    """Without Hugging Face's between them."""
    config = text_configs()[kind]
    model = read_model(config, families())
    values = base_arrays(config, "model.")
    tunix, deepmind = (law.by_law(values, "model.", config, n) for n in ("tunix", "deepmind"))
    other = Spelling(DEEPMIND, "")
    assert_same_bits(arrays(relayout(memory(tunix), model, NATIVE, other)), deepmind)
    assert_same_bits(arrays(relayout(memory(deepmind), model, other, NATIVE)), tunix)


@pytest.mark.parametrize("family", ["gemma1", "gemma2", "gemma3", "gemma4"])
def test_every_row_has_a_law(family: str) -> None:
    stated: set[str] = set()
    for kind, config in text_configs().items():
        if kind.startswith(family):
            stated |= law.outside(config).keys()
            stated |= {n for i in range(config["num_hidden_layers"]) for n in law.inside(config, i)}
    assert {row.name for row in families()[family].rows} == stated


def test_every_row_is_spelled_in_every_layout() -> None:
    for family in families().values():
        for each in family.rows:
            assert all(each.has(layout) for layout in LAYOUTS.values()), each.name


def test_the_law_is_not_blind() -> None:
    """One row with two axes exchanged, where shapes allow it, is not the law any more."""
    config = text_configs()["gemma3"] | {"head_dim": 6}
    family = families()["gemma3"]
    wrong = row(
        "q",
        inputs="d",
        hf=("layers.{i}.self_attn.q_proj.weight", "(h n) d"),
        tunix=("layers.{i}.attn.q_einsum.w", "n d h"),
    )
    rows = tuple(wrong if r.name == "q" else r for r in family.rows)
    model = replace(read_model(config, families()), family=replace(family, rows=rows))
    values = base_arrays(config, "model.")
    lawful = law.by_law(values, "model.", config, "tunix")
    found = arrays(relayout(memory(values), model, Spelling(HF, "model."), NATIVE))
    differ = {n for n in lawful if found[n].tobytes() != lawful[n].tobytes()}
    assert differ == {"layers.0.attn.q_einsum.w", "layers.1.attn.q_einsum.w"}


def test_inputs_are_the_axes_contracted() -> None:
    contracted = {r.name: r.inputs for f in families().values() for r in f.rows if r.is_product}
    assert contracted == {
        "q": ("d",),
        "kv": ("d",),
        "qkv": ("d",),
        "k": ("d",),
        "o": ("n", "h"),
        "gate_up": ("d",),
        "down": ("f",),
        "router": ("d",),
        "per_layer_model_projection": ("d",),
        "per_layer_input_gate": ("d",),
        "per_layer_projection": ("p",),
    }


def test_a_row_needs_the_same_axes_everywhere() -> None:
    with pytest.raises(LayoutError) as caught:
        row("kv", hf=("layers.{i}.{s:k,v}", "(k h) d"), tunix=("layers.{i}.kv", "k d h"))
    assert str(caught.value) == (
        "row kv: the layouts name different axes (hf ['d', 'h', 'k', 's'], tunix ['d', 'h', 'k'])"
    )


def test_a_row_stands_in_layers_or_outside_them() -> None:
    with pytest.raises(LayoutError) as caught:
        row("norm", hf=("layers.{i}.norm", "d"), tunix=("norm", "d"))
    assert str(caught.value) == "row norm: {i} stands in some layouts only"
