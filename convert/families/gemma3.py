"""Gemma 3, text: 270m and 1b.

RMSNorm multiplies by (1 + w) in transformers, Tunix and DeepMind's library alike, so norms are
copied. Checked against transformers 5.12.1 and Tunix 0.1.7 by their forward passes
(tests/convert/test_logits.py).
"""

from gemma_convert.convert.rows import Family, row

EMBEDDER = (
    row(
        "embedding",
        hf=("embed_tokens.weight", "v d"),
        tunix=("embedder.input_embedding", "v d"),
    ),
    row("final_norm", hf=("norm.weight", "d"), tunix=("final_norm.scale", "d")),
)

QUERY_AND_OUTPUT = (
    row(
        "q",
        inputs="d",
        hf=("layers.{i}.self_attn.q_proj.weight", "(n h) d"),
        tunix=("layers.{i}.attn.q_einsum.w", "n d h"),
    ),
    row(
        "o",
        inputs="n h",
        hf=("layers.{i}.self_attn.o_proj.weight", "d (n h)"),
        tunix=("layers.{i}.attn.attn_vec_einsum.w", "n h d"),
    ),
    row(
        "q_norm",
        hf=("layers.{i}.self_attn.q_norm.weight", "h"),
        tunix=("layers.{i}.attn._query_norm.scale", "h"),
    ),
    row(
        "k_norm",
        hf=("layers.{i}.self_attn.k_norm.weight", "h"),
        tunix=("layers.{i}.attn._key_norm.scale", "h"),
    ),
)

KEY_AND_VALUE = row(
    "kv",
    inputs="d",
    hf=("layers.{i}.self_attn.{s:k_proj,v_proj}.weight", "(k h) d"),
    tunix=("layers.{i}.attn.kv_einsum.w", "s k d h"),
)

FEED_FORWARD = (
    row(
        "gate",
        inputs="d",
        hf=("layers.{i}.mlp.gate_proj.weight", "f d"),
        tunix=("layers.{i}.mlp.gate_proj.kernel", "d f"),
    ),
    row(
        "up",
        inputs="d",
        hf=("layers.{i}.mlp.up_proj.weight", "f d"),
        tunix=("layers.{i}.mlp.up_proj.kernel", "d f"),
    ),
    row(
        "down",
        inputs="f",
        hf=("layers.{i}.mlp.down_proj.weight", "d f"),
        tunix=("layers.{i}.mlp.down_proj.kernel", "f d"),
    ),
)

NORMS = (
    row(
        "pre_attention_norm",
        hf=("layers.{i}.input_layernorm.weight", "d"),
        tunix=("layers.{i}.pre_attention_norm.scale", "d"),
    ),
    row(
        "post_attention_norm",
        hf=("layers.{i}.post_attention_layernorm.weight", "d"),
        tunix=("layers.{i}.post_attention_norm.scale", "d"),
    ),
    row(
        "pre_ffw_norm",
        hf=("layers.{i}.pre_feedforward_layernorm.weight", "d"),
        tunix=("layers.{i}.pre_ffw_norm.scale", "d"),
    ),
    row(
        "post_ffw_norm",
        hf=("layers.{i}.post_feedforward_layernorm.weight", "d"),
        tunix=("layers.{i}.post_ffw_norm.scale", "d"),
    ),
)

FAMILY = Family(
    name="gemma3",
    rows=(*EMBEDDER, *QUERY_AND_OUTPUT, KEY_AND_VALUE, *FEED_FORWARD, *NORMS),
    model_types=("gemma3_text", "gemma3"),
    # Gemma3TextConfig of transformers 5.12.1.
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    unsupported={"attention_bias": "attention biases"},
    nested_prefix="language_model.model.",
    models={
        "gemma-3-270m": {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
        },
        "gemma-3-1b": {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
        },
    },
)
