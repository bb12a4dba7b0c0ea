"""Gemma 3: 270m and 1b, and the text part of 4b, 12b and 27b.

RMSNorm multiplies by (1 + w) in transformers, Tunix and DeepMind's library alike, so norms are
copied.
"""

from collections.abc import Mapping

import ml_dtypes

from gemma_convert.convert.families import common, siglip
from gemma_convert.convert.presets.gemma3 import PRESETS
from gemma_convert.convert.rows import Family, Layer
from gemma_convert.convert.stacking import Place, Stacking
from gemma_convert.convert.values import Affine


def times_rounded_root(layer: Layer, at: Mapping[str, int]) -> Affine:
    """MaxText takes the root of Gemma 3's hidden size in bfloat16: 50.5 for 2560.

    Source: ``pad_and_scale_embedding`` in MaxText's param_mapping.py, git e591f30; transformers'
    bfloat16 Gemma 3 multiplies by the same.
    """
    return Affine(float(ml_dtypes.bfloat16(layer.sizes["d"] ** 0.5)))


FAMILY = Family(
    name="gemma3",
    rows=(
        common.EMBEDDING.holding(maxtext=times_rounded_root),
        *common.ATTENTION,
        common.GATE_AND_UP,
        common.DOWN,
        *common.offset(
            common.FINAL_NORM,
            common.QUERY_NORM,
            common.KEY_NORM,
            common.PRE_ATTENTION_NORM,
            common.POST_ATTENTION_NORM,
            common.PRE_FFW_NORM,
            common.POST_FFW_NORM,
        ),
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
    stacks={
        "deepmind-stacked": common.BY_POSITION,
        "maxtext": Stacking(
            "decoder/layers_{i}/",
            (
                Place("decoder/layers/layers_{j}/{path}", axes="b", blocks="whole"),
                Place("decoder/layers_remainder/layers_{j}/{path}", blocks="rest"),
            ),
            axis=1,
            period=6,
        ),
    },
    models={name: preset.sizes for name, preset in PRESETS.items()},
    presets=PRESETS,
    towers=(siglip.TOWER,),
)
