"""Gemma 4, text: 31B, 12B, 26B-A4B, E4B and E2B.

- Global layers have their own head dimension. With ``attention_k_eq_v`` they have their own
  number of key/value heads too and no value projection: Tunix stores ``k_einsum`` there.
- The last ``num_kv_shared_layers`` use the keys and values of earlier layers. On the Hub they
  still carry projections that nothing reads; transformers 5 drops them, Tunix wants them.
- Mixture of experts (26B-A4B): a dense MLP beside the experts, each with norms of its own.
- Per-layer embeddings (E2B, E4B).
- RMSNorm multiplies by w, not by 1 + w, everywhere.
"""

from math import sqrt

from gemma_convert.convert.families import common, gemma4_audio, gemma4_vision
from gemma_convert.convert.presets.gemma4 import PRESETS
from gemma_convert.convert.rows import Family, Layer, row
from gemma_convert.convert.stacking import Place, Stacking


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


def by_root(layer: Layer) -> float:
    """JAX's ``Einsum(w_scale=embed_dim ** -0.5)`` multiplies w, Hugging Face the product.

    Source: Tunix 0.1.7, ``models/gemma4/model.py``; Qwix adapts the einsum with the scaled w.
    """
    return 1 / sqrt(layer.sizes["d"])


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
        maxtext=("decoder/layers_{i}/self_attention/key/kernel", "d k h"),
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
    maxtext=("decoder/layers_{i}/layer_scalar", "1"),
)

FEED_FORWARD = (
    common.GATE_AND_UP.only(is_dense),
    common.DOWN.only(is_dense),
    common.PRE_FFW_NORM.only(is_dense),
    common.POST_FFW_NORM,
)

# With experts, DeepMind calls the dense MLP mlp2 and the experts mlp. HF numbers the two branches
# 1 (dense) and 2 (experts) where DeepMind numbers them 2 and 1.
_SHARED = "decoder/layers_{i}/mlp/moe_block/shared_experts"
_ROUTED = "decoder/layers_{i}/mlp/moe_block/MoeBlock_0"

EXPERTS = (
    common.GATE_AND_UP.only(is_moe).spelled(
        deepmind=("layer_{i}/mlp2/gating_einsum", "c f d"),
        maxtext=(f"{_SHARED}/{{c:wi_0,wi_1}}/kernel", "d f"),
    ),
    common.DOWN.only(is_moe).spelled(
        deepmind=("layer_{i}/mlp2/linear", "f d"), maxtext=(f"{_SHARED}/wo/kernel", "f d")
    ),
    common.norm(
        "pre_feedforward_layernorm", "pre_ffw_norm", "pre_ffw2_norm", maxtext="pre_ffw_norm"
    ).only(is_moe),
    common.norm(
        "post_feedforward_layernorm_1",
        "dense_post_ffw_norm",
        "post_ffw2_norm",
        maxtext="mlp/post_feedforward_layernorm_1",
    ).only(is_moe),
    common.norm(
        "pre_feedforward_layernorm_2",
        "moe_pre_ffw_norm",
        "pre_ffw_norm",
        maxtext="mlp/pre_feedforward_layernorm_2",
    ).only(is_moe),
    common.norm(
        "post_feedforward_layernorm_2",
        "moe_post_ffw_norm",
        "post_ffw1_norm",
        maxtext="mlp/post_feedforward_layernorm_2",
    ).only(is_moe),
    row(
        "router",
        inputs="d",
        where=is_moe,
        hf=("layers.{i}.router.proj.weight", "e d"),
        tunix=("layers.{i}.moe.router_logits", "d e"),
        deepmind=("layer_{i}/mlp/router_logits/w", "d e"),
        maxtext=(f"{_ROUTED}/gate/kernel", "d e"),
    ),
    row(
        "router_scale",
        where=is_moe,
        hf=("layers.{i}.router.scale", "d"),
        tunix=("layers.{i}.moe.router_scale", "d"),
        deepmind=("layer_{i}/mlp/router_scale", "d"),
        maxtext=("decoder/layers_{i}/mlp/pre_forward_scale_2", "d"),
    ),
    row(
        "per_expert_scale",
        where=is_moe,
        hf=("layers.{i}.router.per_expert_scale", "e"),
        tunix=("layers.{i}.moe.per_expert_scale", "e"),
        deepmind=("layer_{i}/mlp/per_expert_scale", "e"),
        maxtext=(f"{_ROUTED}/per_expert_scale", "e"),
    ),
    row(
        "experts_gate_up",
        inputs="d",
        stacked="e",
        where=is_moe,
        hf=("layers.{i}.experts.gate_up_proj", "e (c m) d"),
        tunix=("layers.{i}.moe.gating_einsum", "e c m d"),
        deepmind=("layer_{i}/mlp/gating_einsum/w", "e c m d"),
        maxtext=(f"{_ROUTED}/{{c:wi_0,wi_1}}", "e d m"),
    ),
    row(
        "experts_down",
        inputs="m",
        stacked="e",
        where=is_moe,
        hf=("layers.{i}.experts.down_proj", "e d m"),
        tunix=("layers.{i}.moe.linear", "e m d"),
        deepmind=("layer_{i}/mlp/linear/w", "e m d"),
        maxtext=(f"{_ROUTED}/wo", "e m d"),
    ),
)

_PER_LAYER = "decoder/per_layer_embedder"

PER_LAYER_EMBEDDINGS = (
    row(
        "per_layer_embedding",
        inputs="w",
        lookup=True,
        where=has_ple,
        hf=("embed_tokens_per_layer.weight", "w (l p)"),
        tunix=("embedder.per_layer_input_embedding", "w l p"),
        tunix_head=("embedder.per_layer_input_embedding", "w (l p)"),
        deepmind=("embedder/per_layer_embeddings", "w l p"),
        maxtext=(f"{_PER_LAYER}/embed_tokens_per_layer", "w (l p)"),
    ),
    row(
        "per_layer_model_projection",
        inputs="d",
        where=has_ple,
        hf=("per_layer_model_projection.weight", "(l p) d"),
        tunix=("embedder.per_layer_model_projection.w", "d l p"),
        tunix_head=("embedder.per_layer_model_projection.w", "d (l p)"),
        deepmind=("embedder/per_layer_model_projection/w", "d l p"),
        maxtext=(f"{_PER_LAYER}/per_layer_model_projection/kernel", "d (l p)"),
    ).scaled(tunix=by_root, tunix_head=by_root, deepmind=by_root),
    row(
        "per_layer_projection_norm",
        where=has_ple,
        hf=("per_layer_projection_norm.weight", "p"),
        tunix=("embedder.per_layer_projection_norm.scale", "p"),
        deepmind=("embedder/per_layer_projection_norm/scale", "p"),
        maxtext=(f"{_PER_LAYER}/per_layer_projection_norm/scale", "p"),
    ),
    row(
        "per_layer_input_gate",
        inputs="d",
        where=has_ple,
        hf=("layers.{i}.per_layer_input_gate.weight", "p d"),
        tunix=("layers.{i}.per_layer_input_gate.w", "d p"),
        deepmind=("layer_{i}/per_layer_input_gate/w", "d p"),
        maxtext=("decoder/layers_{i}/per_layer_input_gate/kernel", "d p"),
    ),
    row(
        "per_layer_projection",
        inputs="p",
        where=has_ple,
        hf=("layers.{i}.per_layer_projection.weight", "d p"),
        tunix=("layers.{i}.per_layer_projection.w", "p d"),
        deepmind=("layer_{i}/per_layer_projection/w", "p d"),
        maxtext=("decoder/layers_{i}/per_layer_projection/kernel", "p d"),
    ),
    common.norm(
        "post_per_layer_input_norm",
        "post_per_layer_input_norm",
        maxtext="post_per_layer_input_norm",
    ).only(has_ple),
)


def scan_refusal(layer: Layer) -> str:
    """MaxText's decoder for E2B and E4B has no scan."""
    return "MaxText does not scan models with per-layer embeddings" if layer.has_ple else ""


SCANNED = Stacking(
    "decoder/layers_{i}/",
    (
        Place(
            "decoder/scanned_blocks/local_layers/{path}",
            axes="bj",
            blocks="whole",
            positions="inner",
        ),
        Place(
            "decoder/scanned_blocks/global_layer/{path}",
            axes="b",
            blocks="whole",
            positions="last",
        ),
        Place("decoder/layers_remainder/layers_{j}/{path}", blocks="rest"),
    ),
    axis=1,
    period=6,
    refusal=scan_refusal,
)

FAMILY = Family(
    name="gemma4",
    rows=(
        common.EMBEDDING.holding(maxtext=common.times_root),
        common.FINAL_NORM,
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
    stacks={"deepmind-stacked": common.BY_POSITION, "maxtext": SCANNED},
    models={name: preset.sizes for name, preset in PRESETS.items()},
    presets=PRESETS,
    towers=(gemma4_vision.TOWER, gemma4_audio.TOWER),
)
