"""Gemma 3: 270m and 1b, and the text part of 4b, 12b and 27b.

RMSNorm multiplies by (1 + w) in transformers, Tunix and DeepMind's library alike, so norms are
copied.
"""

from gemma_convert.convert.families import common
from gemma_convert.convert.presets.gemma3 import PRESETS
from gemma_convert.convert.rows import Family

FAMILY = Family(
    name="gemma3",
    rows=(
        *common.EMBEDDER,
        *common.ATTENTION,
        common.QUERY_NORM,
        common.KEY_NORM,
        common.GATE_AND_UP,
        common.DOWN,
        common.PRE_ATTENTION_NORM,
        common.POST_ATTENTION_NORM,
        common.PRE_FFW_NORM,
        common.POST_FFW_NORM,
    ),
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
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
    unsupported={"attention_bias": "attention biases"},
    nested_prefix="language_model.model.",
    models={name: preset.sizes for name, preset in PRESETS.items()},
    presets=PRESETS,
)
