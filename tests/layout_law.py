"""The law of the layouts written out in numpy, apart from the package.

The law for Tunix is what Tunix 0.1.7 does to Hugging Face's weights when it loads them
(``tunix/models/gemma*/params_safetensors.py``); for DeepMind's library (gemma, git 7691fd4) it is
what its parameter trees hold; Hugging Face's shapes are transformers 5.12.1's: a linear layer is
(out, in), heads lie outermost in ``out``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array

Made = Mapping[str, Callable[..., Array]]


@dataclass(frozen=True)
class Law:
    """One row: Hugging Face's names, and by name the other layouts' arrays made of theirs."""

    hf: tuple[str, ...]
    tunix: Made
    deepmind: Made


def same(weight: Array) -> Array:
    """As it is."""
    return weight


def transposed(weight: Array) -> Array:
    """(out, in) to (in, out)."""
    return weight.T


def unchanged(hf: str, tunix: str, deepmind: str) -> Law:
    """A row whose array is the same everywhere."""
    return Law((hf,), {tunix: same}, {deepmind: same})


def norm(hf: str, tunix: str, deepmind: str) -> Law:
    """A norm over the hidden size."""
    return unchanged(f"{hf}.weight", f"{tunix}.scale", f"{deepmind}/scale")


def made(hf: tuple[str, ...], tunix: str, deepmind: str, function: Callable[..., Array]) -> Law:
    """A row whose array is the same in both JAX layouts."""
    return Law(hf, {tunix: function}, {deepmind: function})


def outside(config: Mapping[str, Any]) -> dict[str, Law]:
    """Rows outside the layers, by row name."""
    laws = {
        "embedding": unchanged(
            "embed_tokens.weight", "embedder.input_embedding", "embedder/input_embedding"
        ),
        "final_norm": norm("norm", "final_norm", "final_norm"),
    }
    p, layers = config.get("hidden_size_per_layer_input"), config["num_hidden_layers"]
    if p:
        laws |= {
            "per_layer_embedding": made(
                ("embed_tokens_per_layer.weight",),
                "embedder.per_layer_input_embedding",
                "embedder/per_layer_embeddings",
                lambda w: w.reshape(-1, layers, p),
            ),
            "per_layer_model_projection": made(
                ("per_layer_model_projection.weight",),
                "embedder.per_layer_model_projection.w",
                "embedder/per_layer_model_projection/w",
                lambda w: w.T.reshape(-1, layers, p),
            ),
            "per_layer_projection_norm": norm(
                "per_layer_projection_norm",
                "embedder.per_layer_projection_norm",
                "embedder/per_layer_projection_norm",
            ),
        }
    return laws


def inside(config: Mapping[str, Any], i: int) -> dict[str, Law]:
    """Rows of layer ``i``, by row name; names without the layer's."""
    gemma4 = "gemma4" in config["model_type"]
    return (
        attention(config, i)
        | (moe_norms() if config.get("enable_moe_block") else norms(config["model_type"]))
        | feed_forward(config)
        | (experts() if config.get("enable_moe_block") else {})
        | (per_layer_input() if config.get("hidden_size_per_layer_input") else {})
        | (
            {"layer_scalar": unchanged("layer_scalar", "skip_scale", "skip_scale")}
            if gemma4
            else {}
        )
    )


def attention(config: Mapping[str, Any], i: int) -> dict[str, Law]:
    """Projections and norms of the heads."""
    gemma4 = "gemma4" in config["model_type"]
    full = gemma4 and config["layer_types"][i] == "full_attention"
    h = config["global_head_dim"] if full else config["head_dim"]

    def heads(weight: Array) -> Array:  # (n h, d) to (n, d, h)
        return weight.reshape(-1, h, weight.shape[1]).transpose(0, 2, 1)

    def stacked(*weights: Array) -> Array:
        return np.stack([heads(weight) for weight in weights])

    q, k, v = (f"self_attn.{s}_proj.weight" for s in "qkv")
    laws: dict[str, Law] = {}
    if not gemma4 and config["num_attention_heads"] == config["num_key_value_heads"]:
        laws["qkv"] = made((q, k, v), "attn.qkv_einsum.w", "attn/qkv_einsum/w", stacked)
    else:
        laws["q"] = made((q,), "attn.q_einsum.w", "attn/q_einsum/w", heads)
        if full and config.get("attention_k_eq_v"):
            laws["k"] = made((k,), "attn.k_einsum.w", "attn/k_einsum/w", heads)
        else:
            laws["kv"] = made((k, v), "attn.kv_einsum.w", "attn/kv_einsum/w", stacked)
    laws["o"] = made(
        ("self_attn.o_proj.weight",),
        "attn.attn_vec_einsum.w",
        "attn/attn_vec_einsum/w",
        lambda o: o.reshape(o.shape[0], -1, h).transpose(1, 2, 0),
    )
    if config["model_type"] not in ("gemma", "gemma2"):
        mark = "" if gemma4 else "_"
        laws["q_norm"] = norm("self_attn.q_norm", "attn._query_norm", f"attn/{mark}query_norm")
        laws["k_norm"] = norm("self_attn.k_norm", "attn._key_norm", f"attn/{mark}key_norm")
    return laws


def norms(model_type: str) -> dict[str, Law]:
    """Norms over the hidden size in a layer without experts."""
    before = {"pre_attention_norm": norm(*("input_layernorm", *["pre_attention_norm"] * 2))}
    if model_type == "gemma":  # two a layer, the second of which stands before the MLP
        pre_ffw = norm("post_attention_layernorm", "pre_ffw_norm", "pre_ffw_norm")
        return before | {"pre_ffw_norm": pre_ffw}
    after = "post_attn_norm" if model_type == "gemma2" else "post_attention_norm"
    return before | {
        after: norm("post_attention_layernorm", after, "post_attention_norm"),
        "pre_ffw_norm": norm("pre_feedforward_layernorm", "pre_ffw_norm", "pre_ffw_norm"),
        "post_ffw_norm": norm("post_feedforward_layernorm", "post_ffw_norm", "post_ffw_norm"),
    }


def moe_norms() -> dict[str, Law]:
    """Norms over the hidden size in a layer with experts; 1 and 2 are crossed in DeepMind's."""
    table = [
        ("input_layernorm", "pre_attention_norm", "pre_attention_norm"),
        ("post_attention_layernorm", "post_attention_norm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "pre_ffw_norm", "pre_ffw2_norm"),
        ("post_feedforward_layernorm_1", "dense_post_ffw_norm", "post_ffw2_norm"),
        ("pre_feedforward_layernorm_2", "moe_pre_ffw_norm", "pre_ffw_norm"),
        ("post_feedforward_layernorm_2", "moe_post_ffw_norm", "post_ffw1_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm", "post_ffw_norm"),
    ]
    return {tunix: norm(hf, tunix, deepmind) for hf, tunix, deepmind in table}


def feed_forward(config: Mapping[str, Any]) -> dict[str, Law]:
    """The dense MLP."""
    mlp = "mlp2" if config.get("enable_moe_block") else "mlp"
    is_2b = config["model_type"] == "gemma2" and config["hidden_size"] == 2304
    old = config["model_type"] == "gemma" or is_2b
    return {
        "gate_up": Law(
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            {
                "mlp.gate_proj.kernel": lambda gate, up: gate.T,
                "mlp.up_proj.kernel": lambda gate, up: up.T,
            },
            {
                f"{mlp}/gating_einsum": lambda gate, up: (
                    np.stack([gate.T, up.T]) if old else np.stack([gate, up])
                )
            },
        ),
        "down": made(
            ("mlp.down_proj.weight",), "mlp.down_proj.kernel", f"{mlp}/linear", transposed
        ),
    }


def experts() -> dict[str, Law]:
    """The experts and their router."""
    return {
        "router": made(
            ("router.proj.weight",), "moe.router_logits", "mlp/router_logits/w", transposed
        ),
        "router_scale": unchanged("router.scale", "moe.router_scale", "mlp/router_scale"),
        "per_expert_scale": unchanged(
            "router.per_expert_scale", "moe.per_expert_scale", "mlp/per_expert_scale"
        ),
        "experts_gate_up": made(
            ("experts.gate_up_proj",),
            "moe.gating_einsum",
            "mlp/gating_einsum/w",
            lambda w: np.stack(np.split(w, 2, axis=1), axis=1),
        ),
        "experts_down": made(
            ("experts.down_proj",),
            "moe.linear",
            "mlp/linear/w",
            lambda w: w.transpose(0, 2, 1),
        ),
    }


def per_layer_input() -> dict[str, Law]:
    """What a layer makes of its own embedding."""
    linear = {
        name: made((f"{name}.weight",), f"{name}.w", f"{name}/w", transposed)
        for name in ("per_layer_input_gate", "per_layer_projection")
    }
    name = "post_per_layer_input_norm"
    return linear | {name: norm(name, name, name)}


def by_law(
    values: Mapping[str, Array], prefix: str, config: Mapping[str, Any], layout: str
) -> dict[str, Array]:
    """The arrays of ``layout``, tunix or deepmind, of Hugging Face's tensors ``values``."""
    found: dict[str, Array] = {}

    def apply(law: Law, hf_layer: str, layer: str) -> None:
        parts = [values[f"{prefix}{hf_layer}{name}"] for name in law.hf]
        targets = law.tunix if layout == "tunix" else law.deepmind
        found.update({layer + name: function(*parts) for name, function in targets.items()})

    for law in outside(config).values():
        apply(law, "", "")
    for i in range(config["num_hidden_layers"]):
        for law in inside(config, i).values():
            apply(law, f"layers.{i}.", f"layers.{i}." if layout == "tunix" else f"layer_{i}/")
    return found
