"""Tunix's model for a config.json: which class, and its config. Facts of Tunix 0.1.7."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from gemma_convert.convert.errors import ConfigError


def tunix_class(config: Mapping[str, Any], family: str, vocabulary: int) -> tuple[Any, Any]:
    """The class of Tunix and its config in float32.

    Args:
        config: config.json as parsed.
        family: Name of the family in the registry.
        vocabulary: Rows of the embedding in Tunix's layout.

    Raises:
        ConfigError: If Tunix's model of the family cannot express this config.
    """
    if family not in _MAKERS:
        raise ConfigError(f"Tunix has no model of {family}", f"it has {', '.join(_MAKERS)}")
    text = _with_defaults(config)
    common = {
        "num_layers": text.num_hidden_layers,
        "num_embed": vocabulary,
        "embed_dim": text.hidden_size,
        "hidden_dim": text.intermediate_size,
        "num_heads": text.num_attention_heads,
        "head_dim": text.head_dim,
        "num_kv_heads": text.num_key_value_heads,
        "sliding_window_size": getattr(text, "sliding_window", None),
    }
    model_class, model_config = _MAKERS[family](text, common)
    return model_class, model_config


def _with_defaults(config: Mapping[str, Any]) -> Any:
    """The text config with what transformers assumes for keys that are left out."""
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).get_text_config()
    except Exception as error:  # of its own and of its validators
        raise ConfigError(
            f"config.json: transformers refuses it: {type(error).__name__}: {error}",
            "compare with another engine",
        ) from error


def _gemma(text: Any, common: dict[str, Any]) -> tuple[Any, Any]:
    from tunix.models.gemma import model as gemma

    has_post_norms = text.model_type == "gemma2"
    scalar = getattr(text, "query_pre_attn_scalar", text.head_dim)
    _require(scalar == text.head_dim, "query_pre_attn_scalar", scalar, text.head_dim)
    return gemma.Gemma, gemma.ModelConfig(
        **common,
        final_logit_softcap=getattr(text, "final_logit_softcapping", None),
        attn_logits_soft_cap=getattr(text, "attn_logit_softcapping", None),
        use_post_attn_norm=has_post_norms,
        use_post_ffw_norm=has_post_norms,
        attention_types=_kinds(text, gemma.AttentionType),
    )


def _gemma3(text: Any, common: dict[str, Any]) -> tuple[Any, Any]:
    from tunix.models.gemma3 import model as gemma3

    kinds = _kinds(text, gemma3.AttentionType)
    pattern = gemma3.GEMMA3_ATTENTION_PATTERN
    wanted = tuple(pattern[i % len(pattern)] for i in range(len(kinds)))
    _require(kinds == wanted, "layer_types", [k.name for k in kinds], [k.name for k in wanted])
    by = gemma3.QueryPreAttentionNormalisation
    scales = {
        text.hidden_size // text.num_attention_heads: by.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        text.head_dim: by.BY_ONE_OVER_SQRT_HEAD_DIM,
    }
    scalar = text.query_pre_attn_scalar
    _require(scalar in scales, "query_pre_attn_scalar", scalar, list(scales))
    return gemma3.Gemma3, gemma3.ModelConfig(
        **common, **_rope(text), query_pre_attn_norm=scales[scalar], param_dtype=_float32()
    )


def _gemma4(text: Any, common: dict[str, Any]) -> tuple[Any, Any]:
    from tunix.models.gemma4 import model as gemma4

    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if getattr(text, "enable_moe_block", False):
        _require_later_router()
        common |= {
            "enable_moe": True,
            "num_experts": text.num_experts,
            "num_experts_per_tok": text.top_k_experts,
            "expert_dim": text.moe_intermediate_size,
        }
    wide = 2 if shared and text.use_double_wide_mlp else None
    return gemma4.Gemma4, gemma4.ModelConfig(
        **common,
        **_rope(text),
        final_logit_softcap=text.final_logit_softcapping,
        attention_pattern=_kinds(text, gemma4.AttentionType),
        global_key_size=text.global_head_dim or text.head_dim,
        num_global_kv_heads=text.num_global_key_value_heads,
        k_eq_v_global=bool(text.attention_k_eq_v),
        per_layer_input_dim=getattr(text, "hidden_size_per_layer_input", 0) or 0,
        frac_shared_layers=shared / text.num_hidden_layers,
        override_kv_shared_ffw_hidden=wide and wide * text.intermediate_size,
        param_dtype=_float32(),
    )


def _require_later_router() -> None:
    """Refuse Tunix 0.1.7: its router is given what its norm gives, not what enters it."""
    version = metadata.version("google-tunix")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) <= (0, 1, 7):
        raise ConfigError(
            f"Tunix {version} feeds the router of experts otherwise than transformers and later "
            "versions of Tunix do: its logits say nothing of the weights",
            "compare with another engine",
        )


_MAKERS = {"gemma1": _gemma, "gemma2": _gemma, "gemma3": _gemma3, "gemma4": _gemma4}


def _kinds(text: Any, enum: Any) -> tuple[Any, ...]:
    of = {"sliding_attention": enum.LOCAL_SLIDING, "full_attention": enum.GLOBAL}
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return tuple(of[kind] for kind in kinds)


def _rope(text: Any) -> dict[str, Any]:
    """Base frequencies and scaling of both kinds of layers; transformers 5 nests them by kind."""
    found: dict[str, Any] = {}
    for side, kind in (("local", "sliding_attention"), ("global", "full_attention")):
        rope = text.rope_parameters[kind]
        found[f"{side}_base_frequency"] = int(rope["rope_theta"])
        found[f"{side}_scale_factor"] = float(rope.get("factor") or 1.0)
    return found


def _require(fits: bool, key: str, found: Any, wanted: Any) -> None:
    if not fits:
        raise ConfigError(
            f"config.json: {key} is {found}, Tunix's model has {wanted}",
            "compare with another engine",
        )


def _float32() -> Any:
    import jax.numpy as jnp

    return jnp.float32
