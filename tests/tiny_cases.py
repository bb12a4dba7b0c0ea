"""Tiny models of every architecture, as configs of transformers and of Tunix. Data only.

Sizes are distinct, heads are grouped unless the case says otherwise, and a global layer of Gemma 4
has sizes of its own. Gemma 3 and one Gemma 4 have seven layers, because Tunix's Gemma 3 has its
first global layer at index 5 whatever its config says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WINDOW = 5


@dataclass(frozen=True)
class Case:
    """One tiny model.

    Attributes:
        family: Name in the registry.
        layers: L for a local and G for a global layer, in order.
        hf_class: Config class in transformers.
        hf: What its config says beside the common sizes.
        tunix: What Tunix's config says beside the common sizes.
    """

    family: str
    layers: str
    hf_class: str
    hf: dict[str, Any]
    tunix: dict[str, Any]

    @property
    def hf_config(self) -> dict[str, Any]:
        """Keys of the config of transformers."""
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        return {
            "vocab_size": 509,
            "hidden_size": 60,  # transformers wants a multiple of the number of heads
            "intermediate_size": 88,
            "num_hidden_layers": len(self.layers),
            "layer_types": [kinds[kind] for kind in self.layers],
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 14,
            "sliding_window": WINDOW,
            "max_position_embeddings": 64,
            **self.hf,
        }

    @property
    def tunix_config(self) -> dict[str, Any]:
        """Arguments of Tunix's ModelConfig, but for the kinds of its layers."""
        return {
            "num_layers": len(self.layers),
            "num_embed": 509,
            "embed_dim": 60,
            "hidden_dim": 88,
            "num_heads": 6,
            "num_kv_heads": 3,
            "head_dim": 14,
            "sliding_window_size": WINDOW,
            **self.tunix,
        }


_NEW_ROPE = {"local_base_frequency": 10_000, "global_base_frequency": 1_000_000}


def _gemma1(kv: int) -> Case:
    tunix = {"final_logit_softcap": None, "use_post_attn_norm": False, "use_post_ffw_norm": False}
    kv_heads = {"num_kv_heads": kv}
    return Case("gemma1", "GGG", "GemmaConfig", {"num_key_value_heads": kv}, tunix | kv_heads)


def _gemma3(kv: int) -> Case:
    hf = {"query_pre_attn_scalar": 14, "num_key_value_heads": kv}
    return Case("gemma3", "LLLLLGL", "Gemma3TextConfig", hf, {**_NEW_ROPE, "num_kv_heads": kv})


def _gemma4(
    layers: str, hf: dict[str, Any], tunix: dict[str, Any], hf_class: str = "Gemma4TextConfig"
) -> Case:
    common = {"global_head_dim": 22, "final_logit_softcapping": 30.0}
    if hf_class == "Gemma4TextConfig":
        common["hidden_size_per_layer_input"] = 0
    return Case(
        "gemma4",
        layers,
        hf_class,
        common | hf,
        {**_NEW_ROPE, "global_key_size": 22, **tunix},
    )


def _keys_as_values(global_kv: int) -> tuple[dict[str, Any], dict[str, Any]]:
    hf = {"attention_k_eq_v": True, "num_global_key_value_heads": global_kv}
    return hf, {"k_eq_v_global": True, "num_global_kv_heads": global_kv}


def _per_layer(kv: int) -> tuple[dict[str, Any], dict[str, Any]]:
    hf = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 509}
    hf |= {"num_key_value_heads": kv, "num_kv_shared_layers": 2}
    return hf, {"per_layer_input_dim": 10, "num_kv_heads": kv, "frac_shared_layers": 2 / 5}


_MOE_HF, _MOE_TUNIX = _keys_as_values(2)
_MOE_HF |= {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
_MOE_HF |= {"moe_intermediate_size": 26}
_MOE_TUNIX |= {"enable_moe": True, "num_experts": 5, "num_experts_per_tok": 2, "expert_dim": 26}
_E2B_HF, _E2B_TUNIX = _per_layer(1)

CASES = {
    "gemma1-mqa": _gemma1(1),
    "gemma1-mha": _gemma1(6),
    "gemma2": Case(
        "gemma2",
        "LGLG",
        "Gemma2Config",
        {
            "query_pre_attn_scalar": 14,
            "attn_logit_softcapping": 5.0,  # low enough to bend the values of so small a model
            "final_logit_softcapping": 7.0,
        },
        {
            "attn_logits_soft_cap": 5.0,
            "final_logit_softcap": 7.0,
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
        },
    ),
    "gemma3": _gemma3(3),
    "gemma3-mha": _gemma3(6),
    "gemma4": _gemma4("LLLLLGG", *_keys_as_values(2)),
    "gemma4-12b": _gemma4("LLG", *_keys_as_values(1), "Gemma4UnifiedTextConfig"),
    "gemma4-moe": _gemma4("LLG", _MOE_HF, _MOE_TUNIX),
    "gemma4-e2b": _gemma4(
        "LLGLG",
        _E2B_HF | {"use_double_wide_mlp": True},
        _E2B_TUNIX | {"override_kv_shared_ffw_hidden": 176},
    ),
    "gemma4-e4b": _gemma4("LLGLG", *_per_layer(2)),
}
