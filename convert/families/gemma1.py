"""Gemma 1: 2b and 7b. Two norms a layer; the one that HF calls post_attention is the MLP's."""

from gemma_convert.convert.families import common
from gemma_convert.convert.presets.gemma1 import PRESETS
from gemma_convert.convert.rows import Family
from gemma_convert.convert.stacking import Place, Stacking

FAMILY = Family(
    name="gemma1",
    rows=(
        common.EMBEDDING.holding(maxtext=common.times_root),
        *common.SCALED_ATTENTION,
        common.OLD_GATE_AND_UP,
        common.DOWN,
        *common.offset(
            common.FINAL_NORM,
            common.PRE_ATTENTION_NORM,
            common.norm("post_attention_layernorm", "pre_ffw_norm", maxtext="pre_ffw_norm"),
        ),
    ),
    model_types=("gemma",),
    # GemmaConfig of transformers 5.12.1.
    defaults={
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "layers_per_global": 1,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    unsupported={"attention_bias": "attention biases"},
    nested_prefix="model.language_model.",
    stacks={
        "deepmind-stacked": common.BY_POSITION,
        "maxtext": Stacking(
            "decoder/layers_{i}/", (Place("decoder/layers/{path}", axes="b"),), axis=1, period=1
        ),
    },
    models={name: preset.sizes for name, preset in PRESETS.items()},
    presets=PRESETS,
)
