"""Gemma 4, text: 31B, 12B, 26B-A4B, E4B and E2B.

- Global layers have their own head dimension. With ``attention_k_eq_v`` they have their own
  number of key/value heads too and no value projection: Tunix stores ``k_einsum`` there.
- The last ``num_kv_shared_layers`` use the keys and values of earlier layers. On the Hub they
  still carry projections that nothing reads; transformers 5 drops them, Tunix wants them.
- Mixture of experts (26B-A4B): a dense MLP beside the experts, each with norms of its own.
- Per-layer embeddings (E2B, E4B).
- RMSNorm multiplies by w, not by 1 + w, everywhere.
"""

from gemma_convert.convert.families import common
from gemma_convert.convert.presets.gemma4 import PRESETS
from gemma_convert.convert.rows import Family, Layer, row


def has_value(layer: Layer) -> bool:
    """A layer with a value projection of its own."""
    return not layer.value_is_key


def value_is_key(layer: Layer) -> bool:
    """A global layer of a model with ``attention_k_eq_v``."""
    return layer.value_is_key


def shares_kv(layer: Layer) -> bool:
    """A layer whose own keys and values nothing reads."""
    return layer.shares_kv


def is_moe(layer: Layer) -> bool:
    """A layer with experts."""
    return layer.is_moe


def is_dense(layer: Layer) -> bool:
    """A layer without experts."""
    return not layer.is_moe


def has_ple(layer: Layer) -> bool:
    """A model with per-layer embeddings."""
    return layer.has_ple


ATTENTION = (
    common.QUERY,
    common.KEY_AND_VALUE.only(has_value).may_lack(shares_kv),
    row(
        "k",
        inputs="d",
        where=value_is_key,
        unread=shares_kv,
        hf=("layers.{i}.self_attn.k_proj.weight", "(k h) d"),
        tunix=("layers.{i}.attn.k_einsum.w", "k d h"),
        deepmind=("layer_{i}/attn/k_einsum/w", "k d h"),
    ),
    common.OUTPUT,
    common.QUERY_NORM.spelled(deepmind=("layer_{i}/attn/query_norm/scale", "h")),
    common.KEY_NORM.spelled(deepmind=("layer_{i}/attn/key_norm/scale", "h")).may_lack(shares_kv),
)

LAYER_SCALAR = row(
    "layer_scalar",
    hf=("layers.{i}.layer_scalar", "1"),
    tunix=("layers.{i}.skip_scale", "1"),
    deepmind=("layer_{i}/skip_scale", "1"),
)

FEED_FORWARD = (
    common.GATE_AND_UP.only(is_dense),
    common.DOWN.only(is_dense),
    common.PRE_FFW_NORM.only(is_dense),
    common.POST_FFW_NORM,
)

# With experts, DeepMind calls the dense MLP mlp2 and the experts mlp. HF numbers the two branches
# 1 (dense) and 2 (experts) where DeepMind numbers them 2 and 1.
EXPERTS = (
    common.GATE_AND_UP.spelled(deepmind=("layer_{i}/mlp2/gating_einsum", "c f d")).only(is_moe),
    common.DOWN.spelled(deepmind=("layer_{i}/mlp2/linear", "f d")).only(is_moe),
    common.norm("pre_feedforward_layernorm", "pre_ffw_norm", "pre_ffw2_norm").only(is_moe),
    common.norm("post_feedforward_layernorm_1", "dense_post_ffw_norm", "post_ffw2_norm").only(
        is_moe
    ),
    common.norm("pre_feedforward_layernorm_2", "moe_pre_ffw_norm", "pre_ffw_norm").only(is_moe),
    common.norm("post_feedforward_layernorm_2", "moe_post_ffw_norm", "post_ffw1_norm").only(is_moe),
    row(
        "router",
        inputs="d",
        where=is_moe,
        hf=("layers.{i}.router.proj.weight", "e d"),
        tunix=("layers.{i}.moe.router_logits", "d e"),
        deepmind=("layer_{i}/mlp/router_logits/w", "d e"),
    ),
    row(
        "router_scale",
        where=is_moe,
        hf=("layers.{i}.router.scale", "d"),
        tunix=("layers.{i}.moe.router_scale", "d"),
        deepmind=("layer_{i}/mlp/router_scale", "d"),
    ),
    row(
        "per_expert_scale",
        where=is_moe,
        hf=("layers.{i}.router.per_expert_scale", "e"),
        tunix=("layers.{i}.moe.per_expert_scale", "e"),
        deepmind=("layer_{i}/mlp/per_expert_scale", "e"),
    ),
    row(
        "experts_gate_up",
        where=is_moe,
        hf=("layers.{i}.experts.gate_up_proj", "e (c m) d"),
        tunix=("layers.{i}.moe.gating_einsum", "e c m d"),
        deepmind=("layer_{i}/mlp/gating_einsum/w", "e c m d"),
    ),
    row(
        "experts_down",
        where=is_moe,
        hf=("layers.{i}.experts.down_proj", "e d m"),
        tunix=("layers.{i}.moe.linear", "e m d"),
        deepmind=("layer_{i}/mlp/linear/w", "e m d"),
    ),
)

PER_LAYER_EMBEDDINGS = (
    row(
        "per_layer_embedding",
        where=has_ple,
        hf=("embed_tokens_per_layer.weight", "w (l p)"),
        tunix=("embedder.per_layer_input_embedding", "w l p"),
        deepmind=("embedder/per_layer_embeddings", "w l p"),
    ),
    row(
        "per_layer_model_projection",
        inputs="d",
        where=has_ple,
        hf=("per_layer_model_projection.weight", "(l p) d"),
        tunix=("embedder.per_layer_model_projection.w", "d l p"),
        deepmind=("embedder/per_layer_model_projection/w", "d l p"),
    ),
    row(
        "per_layer_projection_norm",
        where=has_ple,
        hf=("per_layer_projection_norm.weight", "p"),
        tunix=("embedder.per_layer_projection_norm.scale", "p"),
        deepmind=("embedder/per_layer_projection_norm/scale", "p"),
    ),
    row(
        "per_layer_input_gate",
        inputs="d",
        where=has_ple,
        hf=("layers.{i}.per_layer_input_gate.weight", "p d"),
        tunix=("layers.{i}.per_layer_input_gate.w", "d p"),
        deepmind=("layer_{i}/per_layer_input_gate/w", "d p"),
    ),
    row(
        "per_layer_projection",
        inputs="p",
        where=has_ple,
        hf=("layers.{i}.per_layer_projection.weight", "d p"),
        tunix=("layers.{i}.per_layer_projection.w", "p d"),
        deepmind=("layer_{i}/per_layer_projection/w", "p d"),
    ),
    common.norm("post_per_layer_input_norm", "post_per_layer_input_norm").only(has_ple),
)

FAMILY = Family(
    name="gemma4",
    rows=(
        *common.EMBEDDER,
        *ATTENTION,
        common.PRE_ATTENTION_NORM,
        common.POST_ATTENTION_NORM,
        *FEED_FORWARD,
        LAYER_SCALAR,
        *EXPERTS,
        *PER_LAYER_EMBEDDINGS,
    ),
    model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
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
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "layers_per_global": 6,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "last_layer_is_global": True,
        "tie_word_embeddings": True,
    },
    # Gemma4UnifiedTextConfig has no such key, so the 12B's config.json may lack it.
    own_defaults={
        model_type: {"hidden_size_per_layer_input": 0}
        for model_type in ("gemma4_unified_text", "gemma4_unified")
    },
    unsupported={"attention_bias": "attention biases"},
    nested_prefix="model.language_model.",
    models={name: preset.sizes for name, preset in PRESETS.items()},
    presets=PRESETS,
)
