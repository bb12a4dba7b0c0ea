"""Gemma 2: 2b, 9b and 27b. Tunix shortens the name of the norm behind attention."""

from gemma_convert.convert.families import common
from gemma_convert.convert.presets.gemma2 import PRESETS
from gemma_convert.convert.rows import Family, Layer
from gemma_convert.convert.stacking import Place, Stacking


def is_2b(layer: Layer) -> bool:
    """The 2b, whose gate and up DeepMind's library stores the old way; known by its width."""
    return layer.sizes["d"] == 2304


FAMILY = Family(
    name="gemma2",
    rows=(
        common.EMBEDDING.holding(maxtext=common.times_root),
        *common.SCALED_ATTENTION,
        common.GATE_AND_UP.only(lambda layer: not is_2b(layer)),
        common.OLD_GATE_AND_UP.only(is_2b),
        common.DOWN,
        *common.offset(
            common.FINAL_NORM,
            common.PRE_ATTENTION_NORM,
            common.norm(
                "post_attention_layernorm",
                "post_attn_norm",
                "post_attention_norm",
                maxtext="post_self_attention_norm",
            ),
            common.PRE_FFW_NORM,
            common.POST_FFW_NORM,
        ),
    ),
    model_types=("gemma2",),
    # Gemma2Config of transformers 5.12.1.
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "layers_per_global": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    unsupported={"attention_bias": "attention biases"},
    nested_prefix="model.language_model.",
    # A layer of MaxText is a local and a global one; the names of the modules tell which.
    stacks={
        "deepmind-stacked": common.BY_POSITION,
        "maxtext": Stacking(
            "decoder/layers_{i}/",
            (Place("decoder/layers/{head}_{j}/{tail}", axes="b", words=("local", "global")),),
            axis=1,
            period=2,
        ),
        "maxtext-unscanned": Stacking(
            "decoder/layers_{i}/",
            (Place("decoder/layers_{b}/{head}_{j}/{tail}", words=("local", "global")),),
            period=2,
        ),
    },
    models={name: preset.sizes for name, preset in PRESETS.items()},
    presets=PRESETS,
)
