"""config.json read as dimensions: what is taken, what is assumed, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.layouts import HF, LAYOUTS, TUNIX
from gemma_convert.convert.model import Model, read_model, text_config
from gemma_convert.convert.registry import families
from tests.checkpoints import CONFIGS, GEMMA3

GEMMA4 = CONFIGS["gemma4"]["text_config"]
KNOWN = (
    "known: gemma, gemma2, gemma3_text, gemma3, gemma4_text, gemma4, gemma4_unified_text, "
    "gemma4_unified"
)


def read(config: dict[str, Any], **changes: Any) -> Model:
    """The model of ``config`` with some keys changed."""
    return read_model({**config, **changes}, families())


def kinds(model: Model) -> str:
    """L for a local and G for a global layer."""
    return "".join("G" if layer.is_global else "L" for layer in model.layers)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """``config`` without some keys."""
    return {key: value for key, value in config.items() if key not in keys}


def test_sizes_of_gemma3() -> None:
    model = read(GEMMA3)
    sizes = {"v": 23, "d": 10, "n": 6, "k": 3, "h": 7, "f": 11}
    assert (model.family.name, model.common.sizes) == ("gemma3", sizes)
    assert all(layer.sizes == sizes for layer in model.layers)
    assert not any(layer.value_is_key for layer in model.layers)


def test_global_layers_of_gemma4_have_sizes_of_their_own() -> None:
    model = read(GEMMA4)
    assert kinds(model) == "LLG"
    assert [layer.sizes["h"] for layer in model.layers] == [7, 7, 13]
    assert [layer.sizes["k"] for layer in model.layers] == [3, 3, 2]
    assert [layer.value_is_key for layer in model.layers] == [False, False, True]


def test_global_layers_with_values_keep_the_common_number_of_heads() -> None:
    """As modeling_gemma4.py has it: the global number counts only where the value is the key."""
    model = read(GEMMA4, attention_k_eq_v=False)
    assert [layer.sizes["h"] for layer in model.layers] == [7, 7, 13]
    assert [layer.sizes["k"] for layer in model.layers] == [3, 3, 3]
    assert not any(layer.value_is_key for layer in model.layers)


def test_a_null_number_of_global_heads_is_the_common_one() -> None:
    model = read(GEMMA4, num_global_key_value_heads=None)
    assert [layer.sizes["k"] for layer in model.layers] == [3, 3, 3]


@pytest.mark.parametrize("given", [{}, {"layer_types": None}])
def test_layers_without_a_list_follow_the_family(given: dict[str, Any]) -> None:
    """Five local layers to a global one; Gemma 4 ends in a global one (transformers 5.12.1)."""
    gemma3, gemma4 = without(GEMMA3, "layer_types"), without(GEMMA4, "layer_types")
    assert kinds(read(gemma3, num_hidden_layers=8, **given)) == "LLLLLGLL"
    assert kinds(read(gemma4, num_hidden_layers=8, **given)) == "LLLLLGLG"


def test_a_period_of_its_own() -> None:
    config = without(GEMMA3, "layer_types")
    assert kinds(read(config, num_hidden_layers=5, sliding_window_pattern=2)) == "LGLGL"


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gemma4_text"])
@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
@pytest.mark.parametrize("listed", [False, True])
def test_a_period_counts_where_transformers_reads_one(
    model_type: str, key: str, listed: bool
) -> None:
    """Gemma 3 reads ``sliding_window_pattern`` where no layers are listed; nothing else does."""
    from transformers import AutoConfig

    config: dict[str, Any] = {"num_hidden_layers": 8, key: 3}
    if listed:
        config["layer_types"] = ["full_attention", *["sliding_attention"] * 6, "full_attention"]
    expected = AutoConfig.for_model(model_type, **config).layer_types
    found = read({"model_type": model_type}, **config)
    assert kinds(found) == "".join("G" if kind == "full_attention" else "L" for kind in expected)


def test_the_last_layer_of_gemma4_is_global_whatever_the_list_says() -> None:
    """Gemma4TextConfig of transformers 5.12.1 overrules the list, hence so do the weights."""
    assert kinds(read(GEMMA4, layer_types=["sliding_attention"] * 3)) == "LLG"
    assert kinds(read(GEMMA3, layer_types=["sliding_attention"] * 2)) == "LL"


def test_what_config_leaves_out_is_what_transformers_assumes() -> None:
    model = read({"model_type": "gemma3_text"})
    assert model.common.sizes == {"v": 262208, "d": 2304, "n": 8, "k": 4, "h": 256, "f": 9216}
    assert kinds(model) == "LLLLLG" * 4 + "LL"
    assert model.layers[0].sizes == model.common.sizes
    assert model.tied


def test_defaults_are_those_of_the_installed_transformers() -> None:
    import transformers

    for family, config in (
        ("gemma1", transformers.GemmaConfig()),
        ("gemma2", transformers.Gemma2Config()),
        ("gemma3", transformers.Gemma3TextConfig()),
        ("gemma4", transformers.Gemma4TextConfig()),
        ("gemma4", transformers.Gemma4UnifiedTextConfig()),
    ):
        known = families()[family]
        defaults = {**known.defaults, **known.own_defaults.get(config.model_type, {})}
        ours = {key: v for key, v in defaults.items() if hasattr(config, key)}
        assert ours == {key: getattr(config, key) for key in ours}
        # What only makes layer_types or RoPE is no attribute; the 12B has no per-layer input.
        absent = {"sliding_window_pattern", "layers_per_global", "last_layer_is_global"}
        absent |= {"rope_theta", "rope_local_base_freq"}  # test_rope.py
        if config.model_type == "gemma4_unified_text":
            absent |= {"hidden_size_per_layer_input", "vocab_size_per_layer_input"}
            assert not defaults["hidden_size_per_layer_input"]
        assert defaults.keys() - ours <= absent
        listed = getattr(config, "layer_types", ["full_attention"] * config.num_hidden_layers)
        assert kinds(read({"model_type": config.model_type})) == (
            "".join("G" if kind == "full_attention" else "L" for kind in listed)
        )


def test_the_nested_config_wins() -> None:
    config = {"model_type": "gemma3", "hidden_size": 999, "text_config": GEMMA3}
    assert text_config(config) is GEMMA3
    assert read(config).common.sizes["d"] == 10


def test_a_null_text_config_is_none() -> None:
    assert read(GEMMA3, text_config=None).common.sizes["d"] == 10


def test_the_nested_model_type_suffices() -> None:
    assert read({"model_type": "a_wrapper", "text_config": GEMMA4}).family.name == "gemma4"


@pytest.mark.parametrize(("top", "nested", "tied"), [(False, True, False), (None, False, False)])
def test_the_top_level_says_whether_the_head_is_tied(
    top: bool | None, nested: bool, tied: bool
) -> None:
    text = {**GEMMA3, "tie_word_embeddings": nested}
    config: dict[str, Any] = {"model_type": "gemma3", "text_config": text}
    if top is not None:
        config["tie_word_embeddings"] = top
    assert read(config).tied is tied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None, expected a positive whole number"),
        ({"vocab_size": "23"}, "vocab_size is '23', expected a positive whole number"),
        ({"vocab_size": True}, "vocab_size is True, expected a positive whole number"),
        ({"head_dim": 7.0}, "head_dim is 7.0, expected a positive whole number"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected a positive whole number"),
        ({"intermediate_size": -1}, "intermediate_size is -1, expected a positive whole number"),
        (
            {"num_hidden_layers": None},
            "num_hidden_layers is None, expected a positive whole number",
        ),
        (
            {"layer_types": None, "sliding_window_pattern": 0},
            "sliding_window_pattern is 0, expected a positive whole number",
        ),
        (
            {"num_hidden_layers": 3},
            "num_hidden_layers is 3 but layer_types has 2 entries; repair the one that is wrong",
        ),
        ({"layer_types": 5}, "layer_types is 5, expected a list"),
        (
            {"layer_types": "full_attention"},
            "layer_types is 'full_attention', expected a list",
        ),
        (
            {"layer_types": ["linear", "full_attention"]},
            "unknown layer_types ['linear']",
        ),
        (
            {"layer_types": [["full_attention"], None]},
            "unknown layer_types ['None', \"['full_attention']\"]",
        ),
        ({"model_type": "llama"}, f"model_type 'llama' is not a family known here; {KNOWN}"),
        ({"model_type": ["gemma3"]}, f"model_type ['gemma3'] is not a family known here; {KNOWN}"),
        ({"model_type": None}, f"model_type None is not a family known here; {KNOWN}"),
        (
            {"attention_bias": True},
            "attention_bias = True: attention biases are not supported yet; "
            "models that work: gemma-3-270m, gemma-3-1b, gemma-3-4b, gemma-3-12b, gemma-3-27b",
        ),
    ],
)
def test_what_gemma3_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(GEMMA3, **changes)
    assert str(caught.value) == f"config.json: {message}"


def test_what_gemma4_refuses() -> None:
    """Parameters without rows are refused by name, not lost."""
    with pytest.raises(ConfigError) as caught:
        read(GEMMA4, attention_bias=True)
    assert str(caught.value) == (
        "config.json: attention_bias = True: attention biases are not supported yet; models that "
        "work: gemma-4-31b, gemma-4-26b-a4b, gemma-4-12b, gemma-4-e4b, gemma-4-e2b"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "num_experts is None"),
        ({"enable_moe_block": True, "num_experts": 5}, "moe_intermediate_size is None"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers is '2'"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        (
            {"hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": 0},
            "vocab_size_per_layer_input is 0",
        ),
    ],
)
def test_a_part_without_its_sizes_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(GEMMA4, **changes)
    assert str(caught.value) == f"config.json: {message}, expected a positive whole number"


def row_names(model: Model) -> set[str]:
    """The rows that ``model`` has somewhere."""
    return {parameter.row.name for parameter in model.parameters()}


def test_experts() -> None:
    """They stand in every layer, beside the MLP, and have norms of their own."""
    model = read(GEMMA4, enable_moe_block=True, num_experts=5, moe_intermediate_size=17)
    assert all(layer.is_moe for layer in model.layers)
    assert row_names(model) - row_names(read(GEMMA4)) == {
        "router",
        "router_scale",
        "per_expert_scale",
        "experts_gate_up",
        "experts_down",
        "moe_pre_ffw_norm",
        "moe_post_ffw_norm",
        "dense_post_ffw_norm",
    }
    assert row_names(read(GEMMA4)) <= row_names(model)
    shapes = {
        layout: {
            p.row.name: p.row.cell(LAYOUTS[layout]).pattern.shape(p.sizes)
            for p in model.parameters()
            if p.row.name in ("router", "experts_gate_up", "experts_down")
        }
        for layout in ("hf", "tunix")
    }
    assert shapes == {
        "hf": {"router": (5, 10), "experts_gate_up": (5, 34, 10), "experts_down": (5, 10, 17)},
        "tunix": {
            "router": (10, 5),
            "experts_gate_up": (5, 2, 17, 10),
            "experts_down": (5, 17, 10),
        },
    }


def test_layers_that_share_keys_and_values() -> None:
    """The last ones have keys and values that nothing reads; in E2B a double-wide MLP too."""
    model = read(GEMMA4, num_kv_shared_layers=2, use_double_wide_mlp=True)
    assert [layer.shares_kv for layer in model.layers] == [False, True, True]
    assert [layer.sizes["f"] for layer in model.layers] == [11, 22, 22]
    unread = {str(p) for p in model.parameters() if p.unread}
    assert unread == {"kv of layer 1", "k of layer 2", "k_norm of layer 1", "k_norm of layer 2"}
    single = read(GEMMA4, num_kv_shared_layers=2)
    assert [layer.sizes["f"] for layer in single.layers] == [11, 11, 11]


def test_per_layer_embeddings_are_what_transformers_assumes_of_gemma4() -> None:
    model = read(without(GEMMA4, "hidden_size_per_layer_input"))
    assert {axis: model.common.sizes[axis] for axis in "pwl"} == {"p": 256, "w": 262144, "l": 3}
    assert {name for name in row_names(model) if "per_layer" in name} == {
        "per_layer_embedding",
        "per_layer_model_projection",
        "per_layer_projection_norm",
        "per_layer_input_gate",
        "per_layer_projection",
        "post_per_layer_input_norm",
    }


def test_a_unified_config_says_nothing_of_per_layer_embeddings() -> None:
    """Gemma4UnifiedTextConfig has no such key: it is not the default of the other configs."""
    text = without(GEMMA4, "hidden_size_per_layer_input") | {"model_type": "gemma4_unified_text"}
    nested = {"model_type": "gemma4_unified", "text_config": without(text, "model_type")}
    for config in (text, nested, {"model_type": "gemma4_unified", "text_config": text}):
        assert read(config).parameters() == read(GEMMA4).parameters()
    assert read(text, hidden_size_per_layer_input=5).common.has_ple


def test_what_is_off_has_no_rows() -> None:
    named = row_names(read(GEMMA4))
    assert not any("per_layer" in name or "expert" in name for name in named)
    assert not any(parameter.unread for parameter in read(GEMMA4).parameters())


@pytest.mark.parametrize("key", ["enable_moe_block", "num_kv_shared_layers", "attention_bias"])
@pytest.mark.parametrize("value", [None, 0, False])
def test_what_is_off_is_no_obstacle(key: str, value: Any) -> None:
    assert read(GEMMA4, **{key: value}).parameters() == read(GEMMA4).parameters()


def test_parameters_name_themselves() -> None:
    model = read(GEMMA4)
    named = {str(parameter): parameter for parameter in model.parameters()}
    assert {"embedding", "final_norm", "kv of layer 0", "k of layer 2"} <= named.keys()
    assert "kv of layer 2" not in named
    assert named["kv of layer 1"].parts(HF) == [
        ("layers.1.self_attn.k_proj.weight", {"s": 0}),
        ("layers.1.self_attn.v_proj.weight", {"s": 1}),
    ]
    assert named["kv of layer 1"].parts(TUNIX) == [("layers.1.attn.kv_einsum.w", {})]
