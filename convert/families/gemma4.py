"""Gemma 4, dense text: 31B, with its global layers whose value is the key.

Global layers have their own head dimension and number of key/value heads. With
``attention_k_eq_v`` they have no value projection: Tunix then stores ``k_einsum`` instead of
``kv_einsum``, Hugging Face has a k_proj alone. RMSNorm multiplies by w (no +1) everywhere.
Checked against transformers 5.12.1 and Tunix 0.1.7 by their forward passes
(tests/convert/test_logits.py).
"""

from dataclasses import replace

from gemma_convert.convert.families import gemma3
from gemma_convert.convert.rows import Family, row

KEY_AND_VALUE = replace(gemma3.KEY_AND_VALUE, where=lambda layer: not layer.value_is_key)

KEY_ONLY = row(
    "k",
    inputs="d",
    where=lambda layer: layer.value_is_key,
    hf=("layers.{i}.self_attn.k_proj.weight", "(k h) d"),
    tunix=("layers.{i}.attn.k_einsum.w", "k d h"),
)

LAYER_SCALAR = row(
    "layer_scalar",
    hf=("layers.{i}.layer_scalar", "1"),
    tunix=("layers.{i}.skip_scale", "1"),
)

FAMILY = Family(
    name="gemma4",
    rows=(
        *gemma3.EMBEDDER,
        *gemma3.QUERY_AND_OUTPUT,
        KEY_AND_VALUE,
        KEY_ONLY,
        *gemma3.FEED_FORWARD,
        *gemma3.NORMS,
        LAYER_SCALAR,
    ),
    model_types=("gemma4_text", "gemma4"),
    # Gemma4TextConfig of transformers 5.12.1.
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "sliding_window_pattern": 6,
        "last_layer_is_global": True,
        "tie_word_embeddings": True,
    },
    unsupported={
        "attention_bias": "attention biases",
        "enable_moe_block": "mixture-of-experts layers",
        "hidden_size_per_layer_input": "per-layer embeddings",
        "num_kv_shared_layers": "layers that share keys and values",
    },
    nested_prefix="model.language_model.",
    models={
        "gemma-4-31b": {
            "vocab_size": 262144,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    },
)
