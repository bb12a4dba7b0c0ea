"""Each row against the same mapping written out in numpy, apart from the package.

The law is what Tunix 0.1.7 does to Hugging Face's weights when it loads them
(``tunix/models/gemma*/params_safetensors.py``), and transformers 5.12.1's shapes: a linear layer
is (out, in), heads lie outermost in ``out``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.rows import row
from gemma_convert.convert.tensor import Array
from tests.checkpoints import (
    CONFIGS,
    NATIVE,
    PREFIXES,
    arrays,
    assert_same_bits,
    base_arrays,
    memory,
)

Sizes = Mapping[str, int]
Law = tuple[str, tuple[str, ...], Callable[..., Array]]


def heads(weight: Array, h: int) -> Array:
    """(n h, d) to (n, d, h)."""
    return weight.reshape(-1, h, weight.shape[1]).transpose(0, 2, 1)


def same(weight: Array, h: int) -> Array:
    """As it is."""
    return weight


def transposed(weight: Array, h: int) -> Array:
    """(out, in) to (in, out)."""
    return weight.T


OUTSIDE: dict[str, Law] = {
    "embedding": ("embedder.input_embedding", ("embed_tokens.weight",), same),
    "final_norm": ("final_norm.scale", ("norm.weight",), same),
}
INSIDE: dict[str, Law] = {
    "q": ("attn.q_einsum.w", ("self_attn.q_proj.weight",), heads),
    "kv": (
        "attn.kv_einsum.w",
        ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        lambda k, v, h: np.stack([heads(k, h), heads(v, h)]),
    ),
    "k": ("attn.k_einsum.w", ("self_attn.k_proj.weight",), heads),
    "o": (
        "attn.attn_vec_einsum.w",
        ("self_attn.o_proj.weight",),
        lambda o, h: o.reshape(o.shape[0], -1, h).transpose(1, 2, 0),
    ),
    "q_norm": ("attn._query_norm.scale", ("self_attn.q_norm.weight",), same),
    "k_norm": ("attn._key_norm.scale", ("self_attn.k_norm.weight",), same),
    "gate": ("mlp.gate_proj.kernel", ("mlp.gate_proj.weight",), transposed),
    "up": ("mlp.up_proj.kernel", ("mlp.up_proj.weight",), transposed),
    "down": ("mlp.down_proj.kernel", ("mlp.down_proj.weight",), transposed),
    "pre_attention_norm": ("pre_attention_norm.scale", ("input_layernorm.weight",), same),
    "post_attention_norm": (
        "post_attention_norm.scale",
        ("post_attention_layernorm.weight",),
        same,
    ),
    "pre_ffw_norm": ("pre_ffw_norm.scale", ("pre_feedforward_layernorm.weight",), same),
    "post_ffw_norm": ("post_ffw_norm.scale", ("post_feedforward_layernorm.weight",), same),
    "layer_scalar": ("skip_scale", ("layer_scalar",), same),
}
"""Row to Tunix's name, Hugging Face's names, and Tunix's array made of theirs and the head size."""


def law_of(config: Mapping[str, Any], i: int) -> dict[str, Law]:
    """The rows that layer ``i`` has, by the config alone."""
    absent = set()
    if "gemma4" not in config["model_type"]:
        absent.add("layer_scalar")
    shared = config.get("attention_k_eq_v") and config["layer_types"][i] == "full_attention"
    absent.add("kv" if shared else "k")
    return {name: law for name, law in INSIDE.items() if name not in absent}


def tunix_by_law(
    values: Mapping[str, Array], prefix: str, config: Mapping[str, Any]
) -> dict[str, Array]:
    """Tunix's arrays of the Hugging Face tensors ``values``."""
    made = {
        tunix: function(*(values[prefix + name] for name in names), h=0)
        for tunix, names, function in OUTSIDE.values()
    }
    for i, kind in enumerate(config["layer_types"]):
        h = config["head_dim"]
        if kind == "full_attention":
            h = config.get("global_head_dim", h)
        for tunix, names, function in law_of(config, i).values():
            parts = [values[f"{prefix}layers.{i}.{name}"] for name in names]
            made[f"layers.{i}.{tunix}"] = function(*parts, h=h)
    return made


def text_configs() -> dict[str, dict[str, Any]]:
    """Local and global layers of both families; Gemma 4 with and without keys as values."""
    gemma4 = CONFIGS["gemma4"]["text_config"]
    return {
        "gemma3": CONFIGS["gemma3"],
        "gemma3-mqa": {**CONFIGS["gemma3"], "num_key_value_heads": 1},
        "gemma3-mha": {**CONFIGS["gemma3"], "num_key_value_heads": 6},
        "gemma4": gemma4,
        "gemma4-with-values": {**gemma4, "attention_k_eq_v": False},
    }


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("kind", text_configs())
def test_rows_keep_the_law_both_ways(kind: str, prefix: str) -> None:
    """To Tunix as the law says, and back to the bits it came from; bfloat16."""
    config = text_configs()[kind]
    model = read_model(config, families())
    values = base_arrays(config, prefix)
    lawful = tunix_by_law(values, prefix, config)
    spelling = Spelling(HF, prefix)
    assert_same_bits(arrays(relayout(memory(values), model, spelling, NATIVE)), lawful)
    assert_same_bits(arrays(relayout(memory(lawful), model, NATIVE, spelling)), values)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_row_has_a_law(family: str) -> None:
    rows = {row.name for row in families()[family].rows}
    stated = OUTSIDE.keys() | INSIDE.keys()
    assert rows == (stated if family == "gemma4" else stated - {"k", "layer_scalar"})


def test_the_law_is_not_blind() -> None:
    """One row with two axes exchanged, where shapes allow it, is not the law any more."""
    config = text_configs()["gemma3-mha"] | {"head_dim": 6}
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
    lawful = tunix_by_law(values, "model.", config)
    found = arrays(relayout(memory(values), model, Spelling(HF, "model."), NATIVE))
    differ = {n for n in lawful if found[n].tobytes() != lawful[n].tobytes()}
    assert differ == {"layers.0.attn.q_einsum.w", "layers.1.attn.q_einsum.w"}


def test_inputs_are_the_axes_contracted() -> None:
    contracted = {r.name: r.inputs for r in families()["gemma4"].rows if r.inputs}
    assert contracted == {
        "q": ("d",),
        "kv": ("d",),
        "k": ("d",),
        "o": ("n", "h"),
        "gate": ("d",),
        "up": ("d",),
        "down": ("f",),
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
