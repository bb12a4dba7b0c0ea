"""How a run quantised its base: what is given, what checkpoints say, which modules."""

from __future__ import annotations

from typing import Any

import pytest

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families
from gemma_convert.surgery.adapters.qwix import read_qwix, split_factors
from gemma_convert.surgery.quantise import Scheme
from gemma_convert.surgery.quantised import Dequantised, is_quantised
from gemma_convert.surgery.trained_on import stored_scheme
from gemma_convert.surgery.training_base import as_trained, resolve
from tests.checkpoints import BF16, F32, GEMMA3, NATIVE, factor_arrays, memory, tunix_arrays

NF4, INT8 = Scheme("nf4", 32), Scheme("int8")
RULE = {"module_path": ".*q_einsum", "rank": 4, "weight_qtype": "int4", "tile_size": 0.25}


@pytest.mark.parametrize(
    ("lora", "scheme"),
    [
        ({}, None),
        ({"alpha": 3, "weight_qtype": None}, None),
        ({"weight_qtype": "nf4", "tile_size": 32}, NF4),
        ({"weight_qtype": "int8", "weight_calibration_method": "absmax"}, INT8),
        ({"weight_qtype": "int8", "tile_size": 1.0}, INT8),  # one tile is none
        ({"weight_qtype": "int8", "tile_size": 1}, Scheme("int8", 1)),
        ({"rules": [RULE, {**RULE, "module_path": ".*kv_einsum"}]}, Scheme("int4", 0.25)),
    ],
)
def test_what_metadata_says(lora: dict[str, Any], scheme: Scheme | None) -> None:
    assert stored_scheme({"custom_metadata": {"lora": lora}}) == scheme


@pytest.mark.parametrize("metadata", [{}, {"custom_metadata": None}, {"custom_metadata": {"a": 1}}])
def test_metadata_that_says_nothing(metadata: dict[str, Any]) -> None:
    assert stored_scheme(metadata) is None


@pytest.mark.parametrize(
    ("choice", "stored", "scheme"),
    [
        (Scheme("nf4"), [NF4], NF4),
        (NF4, [NF4], NF4),
        (INT8, [], INT8),
    ],
)
def test_what_is_given_and_what_is_stored(choice: Any, stored: Any, scheme: Any) -> None:
    assert resolve(choice, stored) == scheme


@pytest.mark.parametrize("stored", [[NF4], [Scheme("int8", 8)], [INT8, NF4]])
def test_they_disagree(stored: list[Scheme]) -> None:
    with pytest.raises(AdapterError, match=r"says that training quantised to .*, the options say"):
        resolve(Scheme("int8", 16), stored)


def test_tiles_left_out_are_not_those_of_the_first_of_two() -> None:
    with pytest.raises(AdapterError, match=r"on different bases: .* int8, tile 8 and int8, tile 1"):
        resolve(Scheme("int8"), [Scheme("int8", 8), Scheme("int8", 16)])


def test_only_modules_with_factors_in_the_dtype_of_the_factors() -> None:
    model = read_model(GEMMA3, families())
    factors = factor_arrays(GEMMA3, F32)
    some = {name: array for name, array in factors.items() if "layers.1.mlp" not in name}
    adapter = read_qwix(split_factors(memory(some))[1], {}, 3.0, "run")
    weights = memory(tunix_arrays(GEMMA3, BF16))
    found = as_trained(weights, model, NATIVE, [adapter], Scheme("int8"))
    assert found.keys() == weights.keys()
    quantised = {name for name, tensor in found.items() if is_quantised(tensor)}
    assert quantised == set(adapter.pairs)
    for name, tensor in found.items():
        assert tensor.dtype == F32  # all alike, so that any layout can stack them
        if name not in quantised:
            assert (tensor.numpy() == weights[name].numpy().astype(F32)).all()
        else:
            assert isinstance(tensor, Dequantised)
            assert tensor.scale.dtype == F32
