"""config.json read as dimensions: what is taken, what is assumed, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.model import Model, read_model, text_config
from gemma_convert.convert.registry import families
from tests.checkpoints import CONFIGS, GEMMA3

GEMMA4 = CONFIGS["gemma4"]["text_config"]
KNOWN = "known: gemma3_text, gemma3, gemma4_text, gemma4"


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
    assert (model.family.name, model.sizes) == ("gemma3", {"v": 23, "d": 10})
    assert all(layer.sizes == {"d": 10, "n": 6, "k": 3, "h": 7, "f": 11} for layer in model.layers)
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


def test_the_last_layer_of_gemma4_is_global_whatever_the_list_says() -> None:
    """Gemma4TextConfig of transformers 5.12.1 overrules the list, hence so do the weights."""
    assert kinds(read(GEMMA4, layer_types=["sliding_attention"] * 3)) == "LLG"
    assert kinds(read(GEMMA3, layer_types=["sliding_attention"] * 2)) == "LL"


def test_what_config_leaves_out_is_what_transformers_assumes() -> None:
    model = read({"model_type": "gemma3_text"})
    assert model.sizes == {"v": 262208, "d": 2304}
    assert kinds(model) == "LLLLLG" * 4 + "LL"
    assert model.layers[0].sizes == {"d": 2304, "n": 8, "k": 4, "h": 256, "f": 9216}
    assert model.tied


def test_defaults_are_those_of_the_installed_transformers() -> None:
    import transformers

    for family, config in (
        ("gemma3", transformers.Gemma3TextConfig()),
        ("gemma4", transformers.Gemma4TextConfig()),
    ):
        defaults = families()[family].defaults
        ours = {key: v for key, v in defaults.items() if hasattr(config, key)}
        assert ours == {key: getattr(config, key) for key in ours}
        # The two that only make layer_types are no attributes.
        assert defaults.keys() - ours <= {"sliding_window_pattern", "last_layer_is_global"}
        assert kinds(read({"model_type": config.model_type, "hidden_size_per_layer_input": 0})) == (
            "".join("G" if kind == "full_attention" else "L" for kind in config.layer_types)
        )


def test_the_nested_config_wins() -> None:
    config = {"model_type": "gemma3", "hidden_size": 999, "text_config": GEMMA3}
    assert text_config(config) is GEMMA3
    assert read(config).sizes["d"] == 10


def test_a_null_text_config_is_none() -> None:
    assert read(GEMMA3, text_config=None).sizes["d"] == 10


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
            "models that work: gemma-3-270m, gemma-3-1b",
        ),
    ],
)
def test_what_gemma3_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(GEMMA3, **changes)
    assert str(caught.value) == f"config.json: {message}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block = True: mixture-of-experts layers"),
        (
            {"hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input = 256: per-layer embeddings",
        ),
        (
            {"num_kv_shared_layers": 2},
            "num_kv_shared_layers = 2: layers that share keys and values",
        ),
        ({"attention_bias": True}, "attention_bias = True: attention biases"),
    ],
)
def test_what_gemma4_refuses(changes: dict[str, Any], message: str) -> None:
    """Parameters without rows are refused by name, not lost."""
    with pytest.raises(ConfigError) as caught:
        read(GEMMA4, **changes)
    assert str(caught.value) == (
        f"config.json: {message} are not supported yet; models that work: gemma-4-31b"
    )


def test_per_layer_embeddings_are_what_transformers_assumes_of_gemma4() -> None:
    with pytest.raises(ConfigError, match="hidden_size_per_layer_input = 256"):
        read(without(GEMMA4, "hidden_size_per_layer_input"))


@pytest.mark.parametrize("key", ["enable_moe_block", "num_kv_shared_layers", "attention_bias"])
@pytest.mark.parametrize("value", [None, 0, False])
def test_what_is_off_is_no_obstacle(key: str, value: Any) -> None:
    assert len(read(GEMMA4, **{key: value}).layers) == 3


def test_parameters_name_themselves() -> None:
    model = read(GEMMA4)
    named = {str(parameter): parameter for parameter in model.parameters()}
    assert {"embedding", "final_norm", "kv of layer 0", "k of layer 2"} <= named.keys()
    assert "kv of layer 2" not in named
    assert named["kv of layer 1"].parts("hf") == [
        ("layers.1.self_attn.k_proj.weight", {"s": 0}),
        ("layers.1.self_attn.v_proj.weight", {"s": 1}),
    ]
    assert named["kv of layer 1"].parts("tunix") == [("layers.1.attn.kv_einsum.w", {})]
