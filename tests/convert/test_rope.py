"""RoPE of a config.json: the old and the new form, what transformers makes of them, refusals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.hf_config import updated
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, TUNIX
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.rope import Rope, inverse_frequencies, read_rope
from gemma_convert.convert.tensor import Array
from tests.checkpoints import base_arrays, memory

LINEAR = {"factor": 8.0, "rope_type": "linear"}
OLD = {"rope_theta": 700000.0, "rope_local_base_freq": 9000.0, "rope_scaling": LINEAR}
NEW = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 700000.0, **LINEAR},
        "sliding_attention": {"rope_theta": 9000.0, "rope_type": "default"},
    }
}
SIZES = {"hidden_size": 60, "num_attention_heads": 6, "num_hidden_layers": 7, "head_dim": 22}
SMALL: dict[str, Any] = {
    **SIZES,
    "model_type": "gemma3_text",
    "vocab_size": 23,
    "intermediate_size": 11,
    "num_key_value_heads": 3,
    "layer_types": None,
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.6}
FULL, LOCAL = "full_attention", "sliding_attention"


def rope(model_type: str, **keys: Any) -> dict[str, Rope]:
    """RoPE of a text config with some keys."""
    model = read_model({"model_type": model_type, **SIZES, **keys}, families())
    return dict(model.rope)


def of_transformers(model_type: str, **keys: Any) -> dict[str, Array]:
    """Inverse frequencies by layer type, from the buffers of transformers' own module."""
    from transformers import AutoConfig
    from transformers.models.gemma import modeling_gemma
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.gemma4 import modeling_gemma4
    from transformers.models.gemma4_unified import modeling_gemma4_unified

    module: Any = {
        "gemma": modeling_gemma.GemmaRotaryEmbedding,
        "gemma2": modeling_gemma2.Gemma2RotaryEmbedding,
        "gemma3_text": modeling_gemma3.Gemma3RotaryEmbedding,
        "gemma4_text": modeling_gemma4.Gemma4TextRotaryEmbedding,
        "gemma4_unified_text": modeling_gemma4_unified.Gemma4UnifiedTextRotaryEmbedding,
    }[model_type]
    config = AutoConfig.for_model(model_type, **SIZES, **copy.deepcopy(keys))  # it edits the keys
    buffers = {name: array.numpy() for name, array in module(config).named_buffers()}
    if "inv_freq" in buffers:
        return {FULL: buffers["inv_freq"], LOCAL: buffers["inv_freq"]}
    return {kind: buffers[f"{kind}_inv_freq"] for kind in (FULL, LOCAL)}


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("gemma", {}),
        ("gemma", {"rope_theta": 3000.0}),
        ("gemma", {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}),
        ("gemma2", {"rope_theta": 3000}),
        ("gemma2", {"rope_theta": 3000.0, "rope_scaling": LINEAR}),
        ("gemma2", {"rope_parameters": {"rope_theta": 3000.0, **LINEAR}}),
        ("gemma2", {"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.5}}),
        ("gemma3_text", {}),
        ("gemma3_text", {"rope_scaling": LINEAR}),
        ("gemma3_text", {"rope_parameters": {FULL: LINEAR}}),
        ("gemma3_text", {"rope_parameters": {FULL: None, LOCAL: LINEAR}, "rope_theta": 500.0}),
        ("gemma3_text", {"rope_parameters": {LOCAL: LINEAR, FULL: {}}, "rope_scaling": LINEAR}),
        ("gemma3_text", OLD),
        ("gemma3_text", NEW),
        ("gemma4_text", {}),
        ("gemma4_text", {"global_head_dim": 46}),
        ("gemma4_text", NEW | {"rope_theta": 3.0, "rope_local_base_freq": 3.0}),
        (
            "gemma4_text",
            {"rope_parameters": {FULL: PROPORTIONAL | {"factor": 3.0}, LOCAL: LINEAR}
             | {LOCAL: {"rope_type": "default", "rope_theta": 11.0}}},
        ),
        ("gemma4_unified_text", {"global_head_dim": 46}),
    ],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(model_type: str, keys: dict[str, Any]) -> None:
    """Old form, new form and defaults.

    transformers computes in float32: the exponent's rounding, 2^-24 of at most 1, moves theta^x by
    ln(1e6) * 2^-24 = 8e-7 of itself, and the power and two divisions round again.
    """
    expected = of_transformers(model_type, **keys)
    for kind, found in rope(model_type, **keys).items():
        head_dim = SIZES["head_dim"]
        if found.scaling == "proportional":
            head_dim = keys.get("global_head_dim", 512)
        frequencies = inverse_frequencies(found, head_dim)
        assert frequencies.dtype == np.float64
        np.testing.assert_allclose(frequencies, expected[kind], rtol=1.2e-6, atol=0)


def test_the_two_forms_say_the_same() -> None:
    """F17: the global layers are scaled, the local ones have a base of their own."""
    settings = {FULL: Rope(700000.0, "linear", 8.0), LOCAL: Rope(9000.0)}
    assert rope("gemma3_text", **OLD) == rope("gemma3_text", **NEW) == settings
    nested = {"model_type": "gemma3", "rope_theta": 1.0, "text_config": {**SIZES, **OLD}}
    assert read_model(nested, families()).rope == settings


def test_a_family_that_says_nothing_of_rope() -> None:
    """As transformers: the usual base, unless config.json has another."""
    assert read_rope({}, {}) == dict.fromkeys((FULL, LOCAL), Rope(10000.0))
    assert read_rope({"rope_theta": 7.0}, {})[FULL] == Rope(7.0)


def test_frequencies_by_hand() -> None:
    """Head dimension 8: pairs 0 to 3."""
    default = inverse_frequencies(Rope(16.0), 8)
    np.testing.assert_array_equal(default, [1, 0.5, 0.25, 0.125])
    linear = inverse_frequencies(Rope(16.0, "linear", 4.0), 8)
    np.testing.assert_array_equal(linear, [0.25, 0.125, 0.0625, 0.03125])
    part = inverse_frequencies(Rope(16.0, "proportional", 2.0, 0.5), 8)
    np.testing.assert_array_equal(part, [0.5, 0.25, 0, 0])


@pytest.mark.parametrize("form", [OLD, NEW], ids=["old", "new"])
def test_written_back_in_the_form_read(form: dict[str, Any]) -> None:
    config = {"model_type": "gemma3", "text_config": {**SIZES, **form}, "dtype": "float32"}
    assert updated(config, "float32") == config


def test_the_oldest_spelling_of_the_type() -> None:
    """``type``, of transformers before 4.43."""
    found = rope("gemma2", rope_scaling={"type": "linear", "factor": 3})
    assert found[FULL] == Rope(10000.0, "linear", 3.0)


OLDEST = {"type": "linear", "factor": 8.0}


def test_the_oldest_spelling_is_read_as_it_is_meant() -> None:
    """Transformers 5 drops the scaling of Gemma 3 there, 4.57 has it; Gemma 2's both read.

    The rounding is that of `test_frequencies_are_those_of_transformers`.
    """
    found = inverse_frequencies(rope("gemma3_text", rope_scaling=OLDEST)[FULL], SIZES["head_dim"])
    meant = of_transformers("gemma3_text", rope_scaling=LINEAR)[FULL]
    dropped = of_transformers("gemma3_text", rope_scaling=OLDEST)[FULL]
    np.testing.assert_allclose(found, meant, rtol=1.2e-6, atol=0)
    np.testing.assert_allclose(dropped, meant * 8, rtol=1.2e-6, atol=0)
    found = inverse_frequencies(rope("gemma2", rope_scaling=OLDEST)[FULL], SIZES["head_dim"])
    read = of_transformers("gemma2", rope_scaling=OLDEST)[FULL]
    np.testing.assert_allclose(found, read, rtol=1.2e-6, atol=0)


@pytest.mark.parametrize("nested", [False, True])
def test_the_oldest_spelling_is_written_so_that_all_versions_read_it(nested: bool) -> None:
    text = {**SMALL, "rope_scaling": OLDEST}
    config = {"model_type": "gemma3", "text_config": text} if nested else text
    prefix = "language_model.model." if nested else "model."
    base = memory(base_arrays(config, prefix), config=config, source="base")
    (note,) = convert(base, TUNIX).plan.target.notes
    assert "rope_scaling says linear by the key type, which transformers 5 does not read" in note
    target = convert(base, HF).plan.target
    written = target.config["text_config"] if nested else target.config
    assert written == {**text, "rope_scaling": {**OLDEST, "rope_type": "linear"}}
    assert note in target.notes
    keys = {"rope_scaling": written["rope_scaling"]}
    read = of_transformers("gemma3_text", **keys)[FULL]
    expected = of_transformers("gemma3_text", rope_scaling=LINEAR)[FULL]
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    ("model_type", "scaling"),
    [("gemma2", OLDEST), ("gemma3_text", LINEAR), ("gemma3_text", {**OLDEST, **LINEAR})],
)
def test_what_all_versions_read_is_left_as_it_is(model_type: str, scaling: dict[str, Any]) -> None:
    config = {**SMALL, "model_type": model_type, "rope_scaling": scaling}
    base = memory(base_arrays(config, "model."), config=config, source="base")
    target = convert(base, HF).plan.target
    assert target.config == config
    assert not target.notes


def test_public_models() -> None:
    """Scaled from the 4b on; a quarter of each head rotated in Gemma 4's global layers."""
    found = {
        name: read_model(preset.config, families()).rope
        for family in families().values()
        for name, preset in family.presets.items()
    }
    assert found["gemma-2b"] == found["gemma-2-27b"] == dict.fromkeys((FULL, LOCAL), Rope(10000.0))
    assert found["gemma-3-270m"][FULL] == found["gemma-3-1b"][FULL] == Rope(1e6)
    for name in ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"):
        assert found[name] == {FULL: Rope(1e6, "linear", 8.0), LOCAL: Rope(1e4)}
    for name in (name for name in found if name.startswith("gemma-4")):
        assert found[name] == {FULL: Rope(1e6, "proportional", 1.0, 0.25), LOCAL: Rope(1e4)}


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("gemma", {"rope_theta": 0}, "RoPE's rope_theta is 0, expected a positive number"),
        ("gemma", {"rope_theta": "x"}, "RoPE's rope_theta is 'x', expected a positive number"),
        (
            "gemma3_text",
            {"rope_local_base_freq": float("inf")},
            "RoPE's rope_theta is inf, expected a positive number",
        ),
        (
            "gemma3_text",
            {"rope_scaling": {"rope_type": "linear"}},
            "RoPE's factor is None, expected a positive number",
        ),
        ("gemma3_text", {"rope_scaling": [8]}, "rope_scaling is [8], expected an object"),
        ("gemma3_text", {"rope_scaling": {"rope_type": 8}}, "rope_type is 8, expected a word"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
            "rope_parameters has rope_theta, rope_type, expected full_attention and "
            "sliding_attention; the model_type has the other form",
        ),
        (
            "gemma2",
            NEW,
            "rope_parameters has full_attention, sliding_attention, expected rope_type, "
            "rope_theta, ...; the model_type has the other form",
        ),
        (
            "gemma4_text",
            {"rope_parameters": {FULL: {**PROPORTIONAL, "partial_rotary_factor": 1.5}}},
            "RoPE's partial_rotary_factor is 1.5, above 1",
        ),
    ],
)
def test_what_is_refused(model_type: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rope(model_type, **keys)
    assert str(caught.value) == f"config.json: {message}"


def test_a_scaling_that_is_not_known_is_carried_but_has_no_frequencies_here() -> None:
    found = rope("gemma2", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(ConfigError, match=r"rope_type 'yarn' is not known here; known: default"):
        inverse_frequencies(found[FULL], 8)
