"""config.json of the output: what a conversion changes there, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from gemma_convert.convert.hf_config import updated

QUANTISED = {"quantization_config": {"quant_method": "bitsandbytes"}}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_key_of_the_dtype_is_kept(key: str) -> None:
    config = {"model_type": "gemma3", key: "float16", "text_config": {key: "float16"}}
    assert updated(config, "bfloat16") == {
        "model_type": "gemma3",
        key: "bfloat16",
        "text_config": {key: "bfloat16"},
    }


def test_a_dtype_is_added_at_the_top_only() -> None:
    config: dict[str, Any] = {"text_config": {"x": 1}}
    assert updated(config, "float32") == {"text_config": {"x": 1}, "dtype": "float32"}


def test_no_longer_quantised_anywhere() -> None:
    config = {
        **QUANTISED,
        "dtype": "bfloat16",
        "text_config": {**QUANTISED, "dtype": "bfloat16"},
        "vision_config": {**QUANTISED, "depth": 27},
        "audio_config": {**QUANTISED, "torch_dtype": "float32"},
    }
    assert updated(config, "bfloat16") == {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "vision_config": {"depth": 27},
        "audio_config": {"torch_dtype": "bfloat16"},
    }


def test_everything_else_is_carried_in_order() -> None:
    config = {"b": [1, {"dtype": "kept"}], "dtype": "float16", "a": None, "vision_config": None}
    found = updated(config, "bfloat16")
    assert list(found) == list(config)
    assert found == {**config, "dtype": "bfloat16"}


def test_the_config_given_is_not_touched() -> None:
    config = {**QUANTISED, "text_config": {"dtype": "float16"}}
    updated(config, "bfloat16")
    assert config == {**QUANTISED, "text_config": {"dtype": "float16"}}
