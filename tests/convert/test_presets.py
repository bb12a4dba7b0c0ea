"""Configs of the public models, against transformers' and Tunix's own classes. No weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.layouts import TUNIX
from gemma_convert.convert.model import read_model, text_config
from gemma_convert.convert.presets.preset import Preset, hub_config
from gemma_convert.convert.registry import families, named_model
from gemma_convert.convert.vocabulary import vocabulary

PRESETS = {n: preset for family in families().values() for n, preset in family.presets.items()}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
LARGE = {"sliding_window": 1024, "max_position_embeddings": 262_144}
LARGE |= {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0}


def _gemma3(hidden: int, layers: int, heads: int, kv: int, **keys: Any) -> dict[str, Any]:
    """As convert_gemma3_weights.py of transformers builds them; 4b and larger are the default."""
    usual = {"head_dim": 256, "intermediate_size": 4 * hidden, "vocab_size": 262_208}
    usual |= {"sliding_window": 1024, "rope_parameters": LINEAR, "query_pre_attn_scalar": 256}
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers}
    return usual | sizes | {"num_attention_heads": heads, "num_key_value_heads": kv} | keys


def _gemma4(hidden: int, layers: int, heads: int, kv: int, **keys: Any) -> dict[str, Any]:
    """As convert_gemma4_weights.py of transformers builds them."""
    usual = {"intermediate_size": 4 * hidden, "final_logit_softcapping": 30.0}
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers}
    return usual | sizes | {"num_attention_heads": heads, "num_key_value_heads": kv} | keys


_SMALL3 = {"vocab_size": 262_144, "sliding_window": 512, "max_position_embeddings": 32_768}
_SMALL3 |= {"rope_parameters": None}
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-2b": (
        "GemmaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
        },
    ),
    "gemma-7b": ("GemmaConfig", {}),
    "gemma-2-2b": ("Gemma2Config", {}),
    "gemma-2-9b": (
        "Gemma2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    ),
    "gemma-2-27b": (
        "Gemma2Config",
        {
            "hidden_size": 4608,
            "intermediate_size": 36864,
            "num_hidden_layers": 46,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 4608 // 32,
        },
    ),
    "gemma-3-270m": (
        "Gemma3TextConfig",
        _gemma3(640, 18, 4, 1, intermediate_size=2048, **_SMALL3),
    ),
    "gemma-3-1b": (
        "Gemma3TextConfig",
        _gemma3(1152, 26, 4, 1, intermediate_size=6 * 1152, **_SMALL3),
    ),
    "gemma-3-4b": ("Gemma3TextConfig", _gemma3(2560, 34, 8, 4)),
    "gemma-3-12b": ("Gemma3TextConfig", _gemma3(30 * 128, 48, 16, 8)),
    "gemma-3-27b": (
        "Gemma3TextConfig",
        _gemma3(42 * 128, 62, 32, 16, head_dim=128, query_pre_attn_scalar=42 * 128 // 32),
    ),
    "gemma-4-31b": (
        "Gemma4TextConfig",
        _gemma4(5376, 60, 32, 16, num_global_key_value_heads=4, attention_k_eq_v=True, **LARGE),
    ),
    "gemma-4-26b-a4b": (
        "Gemma4TextConfig",
        _gemma4(
            2816,
            30,
            16,
            8,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            intermediate_size=2112,
            enable_moe_block=True,
            num_experts=128,
            moe_intermediate_size=704,
            top_k_experts=8,
            **LARGE,
        ),
    ),
    "gemma-4-12b": (
        "Gemma4UnifiedTextConfig",
        _gemma4(3840, 48, 16, 8, num_global_key_value_heads=1, attention_k_eq_v=True, **LARGE),
    ),
    "gemma-4-e4b": ("Gemma4TextConfig", _gemma4(2560, 42, 8, 2, num_kv_shared_layers=18)),
    "gemma-4-e2b": (
        "Gemma4TextConfig",
        _gemma4(
            1536,
            35,
            8,
            1,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
            layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        ),
    ),
}
"""Arguments of transformers' config classes; what they leave out is the classes' own."""

SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
SIGLIP |= {"num_attention_heads": 16, "image_size": 896, "patch_size": 14}
LARGE_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3-4b": ("Gemma3Config", {"vision_config": SIGLIP}),
    "gemma-3-12b": ("Gemma3Config", {"vision_config": SIGLIP}),
    "gemma-3-27b": ("Gemma3Config", {"vision_config": SIGLIP}),
    "gemma-4-31b": ("Gemma4Config", {"vision_config": LARGE_VISION}),
    "gemma-4-26b-a4b": ("Gemma4Config", {"vision_config": LARGE_VISION}),
    "gemma-4-12b": ("Gemma4UnifiedConfig", {"vision_config": {}, "audio_config": {}}),
    "gemma-4-e4b": (
        "Gemma4Config",
        {"vision_config": {"use_clipped_linears": True}, "audio_config": {}},
    ),
    "gemma-4-e2b": (
        "Gemma4Config",
        {"vision_config": {"use_clipped_linears": True}, "audio_config": {}},
    ),
}

SAID_BY_THE_HUB = {
    "_name_or_path",
    "architectures",
    "dtype",
    "eos_token_id",  # the end of a turn beside the end of a text
    "transformers_version",
    "_sliding_window_pattern",
}
"""Keys in which ours say what the checkpoint has and the classes do not."""


@pytest.mark.parametrize(
    ("name", "multimodal"), [*((n, False) for n in TEXT), *((n, True) for n in WRAPPERS)]
)
def test_transformers_reads_what_its_own_classes_say(
    name: str, multimodal: bool, tmp_path: Path
) -> None:
    """Every value, nested ones too; ours may only say more."""
    import transformers

    text_class, text = TEXT[name]
    if multimodal:
        wrapper_class, wrapper = WRAPPERS[name]
        own = getattr(transformers, wrapper_class)(text_config=dict(text), **wrapper)
    else:
        own = getattr(transformers, text_class)(**text)
    written = hub_config(PRESETS[name], multimodal=multimodal)
    (tmp_path / "config.json").write_text(json.dumps(written))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(read) is type(own)
    assert hasattr(transformers, written["architectures"][0])
    agree(read.to_dict(), own.to_dict())


def agree(found: dict[str, Any], own: dict[str, Any]) -> None:
    """``found`` has every value of ``own``, at every depth."""
    for key in own.keys() - SAID_BY_THE_HUB:
        if key.endswith("_config") and isinstance(own[key], dict):
            agree(found[key], own[key])
        else:
            assert found[key] == own[key], key


@pytest.mark.parametrize("name", PRESETS)
def test_every_form_is_read_as_the_same_model(name: str) -> None:
    model = named_model(name)
    assert model.name == name
    for multimodal in (False, True):
        config = hub_config(PRESETS[name], multimodal=multimodal)
        assert read_model(config, families()).parameters() == model.parameters()
        assert ("text_config" in config) == (multimodal and name in WRAPPERS)
        assert text_config(config)["model_type"] == PRESETS[name].text["model_type"]


@pytest.mark.parametrize("name", PRESETS)
def test_token_ids(name: str) -> None:
    """The 4b of Gemma 3 on has 64 more rows for the image token; a turn ends in 106."""
    config = PRESETS[name].config
    assert (config["bos_token_id"], config["pad_token_id"]) == (2, 0)
    wrapper = PRESETS[name].wrapper
    last = config["eos_token_id"] if not wrapper else wrapper["eos_token_id"]
    newer = name.startswith(("gemma-3", "gemma-4"))
    assert last == ([1, 106] if newer else 1)
    for key, value in wrapper.items():
        if key.startswith(("boi_", "eoi_", "image_", "boa_", "eoa_", "audio_", "video_")):
            assert not isinstance(value, int) or value < config["vocab_size"], key


def _tunix() -> dict[str, Any]:
    """Tunix's own presets by our names. It has none of the 27b of Gemma 2 and of the 12B."""
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma4 import model as gemma4

    return {
        "gemma-2b": gemma.ModelConfig.gemma_2b(),
        "gemma-7b": gemma.ModelConfig.gemma_7b(),
        "gemma-2-2b": gemma.ModelConfig.gemma2_2b(),
        "gemma-2-9b": gemma.ModelConfig.gemma2_9b(),
        "gemma-3-270m": gemma3.ModelConfig.gemma3_270m(),
        "gemma-3-1b": gemma3.ModelConfig.gemma3_1b_pt(),
        "gemma-3-4b": gemma3.ModelConfig.gemma3_4b_pt(),
        "gemma-3-12b": gemma3.ModelConfig.gemma3_12b_pt(),
        "gemma-3-27b": gemma3.ModelConfig.gemma3_27b_pt(),
        "gemma-4-31b": gemma4.ModelConfig.gemma4_31b(),
        "gemma-4-26b-a4b": gemma4.ModelConfig.gemma4_26b_a4b(),
        "gemma-4-e4b": gemma4.ModelConfig.gemma4_e4b(),
        "gemma-4-e2b": gemma4.ModelConfig.gemma4_e2b(),
    }


def _as_tunix_says(name: str) -> dict[str, Any]:
    """What our preset of ``name`` is in the words of Tunix's ModelConfig."""
    model, text = named_model(name), PRESETS[name].config
    full, local = model.rope["full_attention"], model.rope["sliding_attention"]
    shared, wide = text.get("num_kv_shared_layers", 0), text.get("use_double_wide_mlp")
    layers, dense = text["num_hidden_layers"], text["intermediate_size"]
    return {
        "num_layers": layers,
        "num_embed": vocabulary(model, TUNIX),
        "embed_dim": text["hidden_size"],
        "hidden_dim": dense,
        "num_heads": text["num_attention_heads"],
        "num_kv_heads": text["num_key_value_heads"],
        "head_dim": text["head_dim"],
        "sliding_window_size": text.get("sliding_window"),
        "attn_logits_soft_cap": text.get("attn_logit_softcapping"),
        "final_logit_softcap": text.get("final_logit_softcapping"),
        "global_base_frequency": full.theta,
        "local_base_frequency": local.theta,
        "global_scale_factor": full.factor,
        "local_scale_factor": local.factor,
        "global_rope_proportion": full.partial,
        "local_rope_proportion": local.partial,
        "query_pre_attn_norm": {256: "HEAD_DIM", 168: "EMBED_DIM_DIV_NUM_HEADS"}.get(
            text.get("query_pre_attn_scalar", 0)
        ),
        "per_layer_input_dim": text.get("hidden_size_per_layer_input"),
        "num_global_kv_heads": text.get("num_global_key_value_heads"),
        "global_key_size": text.get("global_head_dim"),
        "k_eq_v_global": text.get("attention_k_eq_v", False),
        "frac_shared_layers": shared / layers,
        "override_kv_shared_ffw_hidden": 2 * dense if wide else None,
        "enable_moe": text.get("enable_moe_block", False),
        "num_experts": text.get("num_experts"),
        "num_experts_per_tok": text.get("top_k_experts"),
        "expert_dim": text.get("moe_intermediate_size"),
        "moe_dense_hidden_dim": dense if text.get("enable_moe_block") else None,
        "kinds": "".join("G" if layer.is_global else "L" for layer in model.layers),
    }


FAULTS = {"gemma-2-9b": {"hidden_dim": 28672}}
"""Where Tunix 0.1.7 is wrong: the checkpoint has half of that."""
NOT_OF_THE_MODEL = {"shd_config", "remat_config", "param_dtype", "dtype", "vision_config"}
NOT_OF_THE_MODEL |= {"use_flash_attention", "flash_attention_block_size"}
NOT_OF_THE_MODEL |= {"use_sliding_window_kv_cache", "use_post_attn_norm", "use_post_ffw_norm"}
PATTERNS = {"attention_types", "attention_pattern"}


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:tunix\.")
@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"gemma-2-27b", "gemma-4-12b"}))
def test_tunix_has_the_same_numbers(name: str) -> None:
    config = _tunix()[name]
    said = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    ours = _as_tunix_says(name)
    for key, value in said.items():
        if key in PATTERNS and value is not None:
            letters = "".join(kind.name[0] for kind in value)  # LOCAL_SLIDING, GLOBAL
            layers = ours["num_layers"]
            assert (letters * layers)[:layers] == ours["kinds"], key
        elif key == "query_pre_attn_norm":
            assert value.name == f"BY_ONE_OVER_SQRT_{ours[key]}"
        elif key not in NOT_OF_THE_MODEL | PATTERNS:
            fault = FAULTS.get(name, {}).get(key)
            assert value == (ours[key] if fault is None else fault), key
            assert fault is None or ours[key] == fault / 2


def test_tables_hold_every_public_model() -> None:
    assert PRESETS.keys() == TEXT.keys()
    for family in families().values():
        assert family.presets.keys() == family.models.keys()
    assert {name for name, preset in PRESETS.items() if preset.wrapper} == WRAPPERS.keys()
    assert all(isinstance(preset, Preset) for preset in PRESETS.values())
