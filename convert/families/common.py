"""Rows that several generations of Gemma share.

Sources: the parameter trees of transformers 5.12.1 and Tunix 0.1.7; every row is checked by the
forward passes of both (tests/convert/test_logits.py).
"""

from gemma_convert.convert.rows import Layer, Row, row


def fuses_qkv(layer: Layer) -> bool:
    """Gemma 1 to 3 in JAX: as many key/value heads as query heads are stored as one array."""
    return layer.sizes["n"] == layer.sizes["k"]


def splits_q(layer: Layer) -> bool:
    """The opposite of `fuses_qkv`."""
    return not fuses_qkv(layer)


EMBEDDER = (
    row(
        "embedding",
        hf=("embed_tokens.weight", "v d"),
        tunix=("embedder.input_embedding", "v d"),
        deepmind=("embedder/input_embedding", "v d"),
    ),
    row(
        "final_norm",
        hf=("norm.weight", "d"),
        tunix=("final_norm.scale", "d"),
        deepmind=("final_norm/scale", "d"),
    ),
)

QUERY = row(
    "q",
    inputs="d",
    hf=("layers.{i}.self_attn.q_proj.weight", "(n h) d"),
    tunix=("layers.{i}.attn.q_einsum.w", "n d h"),
    deepmind=("layer_{i}/attn/q_einsum/w", "n d h"),
)

KEY_AND_VALUE = row(
    "kv",
    inputs="d",
    hf=("layers.{i}.self_attn.{s:k_proj,v_proj}.weight", "(k h) d"),
    tunix=("layers.{i}.attn.kv_einsum.w", "s k d h"),
    deepmind=("layer_{i}/attn/kv_einsum/w", "s k d h"),
)

QUERY_KEY_VALUE = row(
    "qkv",
    inputs="d",
    where=fuses_qkv,
    hf=("layers.{i}.self_attn.{s:q_proj,k_proj,v_proj}.weight", "(n h) d"),
    tunix=("layers.{i}.attn.qkv_einsum.w", "s n d h"),
    deepmind=("layer_{i}/attn/qkv_einsum/w", "s n d h"),
)

OUTPUT = row(
    "o",
    inputs="n h",
    hf=("layers.{i}.self_attn.o_proj.weight", "d (n h)"),
    tunix=("layers.{i}.attn.attn_vec_einsum.w", "n h d"),
    deepmind=("layer_{i}/attn/attn_vec_einsum/w", "n h d"),
)

ATTENTION = (QUERY.only(splits_q), KEY_AND_VALUE.only(splits_q), QUERY_KEY_VALUE, OUTPUT)
"""Attention of Gemma 1 to 3."""

QUERY_NORM = row(
    "q_norm",
    hf=("layers.{i}.self_attn.q_norm.weight", "h"),
    tunix=("layers.{i}.attn._query_norm.scale", "h"),
    deepmind=("layer_{i}/attn/_query_norm/scale", "h"),
)

KEY_NORM = row(
    "k_norm",
    hf=("layers.{i}.self_attn.k_norm.weight", "h"),
    tunix=("layers.{i}.attn._key_norm.scale", "h"),
    deepmind=("layer_{i}/attn/_key_norm/scale", "h"),
)

GATE_AND_UP = row(
    "gate_up",
    inputs="d",
    hf=("layers.{i}.mlp.{c:gate_proj,up_proj}.weight", "f d"),
    tunix=("layers.{i}.mlp.{c:gate_proj,up_proj}.kernel", "d f"),
    deepmind=("layer_{i}/mlp/gating_einsum", "c f d"),
)

# The library's transpose_gating_einsum is off for Gemma 1 and the 2b of Gemma 2.
OLD_GATE_AND_UP = GATE_AND_UP.spelled(deepmind=("layer_{i}/mlp/gating_einsum", "c d f"))

DOWN = row(
    "down",
    inputs="f",
    hf=("layers.{i}.mlp.down_proj.weight", "d f"),
    tunix=("layers.{i}.mlp.down_proj.kernel", "f d"),
    deepmind=("layer_{i}/mlp/linear", "f d"),
)


def norm(hf: str, tunix: str, deepmind: str = "") -> Row:
    """The row of a per-layer norm over the hidden size, by its names; DeepMind's as Tunix's."""
    return row(
        tunix,
        hf=(f"layers.{{i}}.{hf}.weight", "d"),
        tunix=(f"layers.{{i}}.{tunix}.scale", "d"),
        deepmind=(f"layer_{{i}}/{deepmind or tunix}/scale", "d"),
    )


PRE_ATTENTION_NORM = norm("input_layernorm", "pre_attention_norm")
POST_ATTENTION_NORM = norm("post_attention_layernorm", "post_attention_norm")
PRE_FFW_NORM = norm("pre_feedforward_layernorm", "pre_ffw_norm")
POST_FFW_NORM = norm("post_feedforward_layernorm", "post_ffw_norm")
