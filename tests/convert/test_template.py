"""Name templates: one text that writes names and reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_convert.convert.template import parse

KV = parse("layers.{i}.self_attn.{s:k_proj,v_proj}.weight")


@given(st.integers(0, 10**9 - 1), st.integers(0, 1))
def test_a_name_written_is_read_back(layer: int, word: int) -> None:
    assert KV.match(KV.format({"i": layer, "s": word})) == {"i": layer, "s": word}


def test_names_are_spelled_by_number_and_by_word() -> None:
    assert KV.format({"i": 11, "s": 1}) == "layers.11.self_attn.v_proj.weight"
    assert KV.words == {"s": ("k_proj", "v_proj")}


def test_a_template_without_axes_is_its_own_only_name() -> None:
    norm = parse("norm.weight")
    assert norm.format({}) == "norm.weight"
    assert norm.match("norm.weight") == {}


@pytest.mark.parametrize(
    "name",
    [
        "layers.01.self_attn.k_proj.weight",  # not as we would write it: two names, one layer
        "layers.-1.self_attn.k_proj.weight",
        "layers.\u0661.self_attn.k_proj.weight",  # a digit to int(), not to us
        "layers." + "9" * 5000 + ".self_attn.k_proj.weight",  # more digits than int() takes
        "layers.1.self_attn.q_proj.weight",
        "layers.1.self_attn.k_proj,v_proj.weight",
        "layersX1.self_attn.k_proj.weight",  # a dot is a dot
        "model.layers.1.self_attn.k_proj.weight",
        "layers.1.self_attn.k_proj.weight_lora_a",
        "layers.1.self_attn.k_proj.weight\n",
        "",
    ],
)
def test_other_names_are_not_read(name: str) -> None:
    assert KV.match(name) is None
