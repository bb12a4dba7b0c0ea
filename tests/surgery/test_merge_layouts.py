"""Adapters on the way to other layouts: merged then converted is converted then merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, LAYOUTS
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapters.open import adapter_source
from tests.checkpoints import F32, GEMMA3, arrays, base_arrays, memory
from tests.peft_files import factors, in_memory

GEMMA2: dict[str, Any] = {
    **{key: value for key, value in GEMMA3.items() if key != "architectures"},
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 5,
}
MODULES = {
    "self_attn.q_proj": (10, 42),
    "self_attn.k_proj": (10, 21),
    "self_attn.o_proj": (42, 10),
    "mlp.gate_proj": (10, 11),
}
LAYERS = (0, 3)
TARGETS = ["tunix", "deepmind", "deepmind-stacked", "maxtext", "maxtext-unscanned"]


def adapter(kind: str) -> Checkpoint:
    values: dict[str, Array] = {}
    random = np.random.default_rng(3)
    for layer in LAYERS:
        for module, (inputs, outputs) in MODULES.items():
            path = f"model.layers.{layer}.{module}"
            values |= factors(path, inputs, outputs)
            if kind == "dora":
                name = f"base_model.model.{path}.lora_magnitude_vector"
                values[name] = random.uniform(0.2, 0.4, outputs).astype(F32)
    return in_memory(values, use_dora=kind == "dora")


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("to", TARGETS)
def test_merging_commutes_with_converting(to: str, kind: str) -> None:
    """Gemma 2: MaxText's queries are scaled, its norms are 1 + w, its layers are stacked."""
    base = memory(base_arrays(GEMMA2, "model.", F32), config=GEMMA2, source="base")
    sources = [adapter_source(adapter(kind))]
    merged = convert(base, HF, adapters=sources).plan.target
    there = memory(arrays(merged), config=GEMMA2, source="merged")
    expected = arrays(convert(there, LAYOUTS[to]).plan.target)
    plain = arrays(convert(base, LAYOUTS[to]).plan.target)
    found = arrays(convert(base, LAYOUTS[to], adapters=sources).plan.target)
    assert found.keys() == expected.keys()
    changed = 0
    for name, array in expected.items():
        # weights below 1 in size, a scale of 5 ** -0.5, a few float32 operations
        assert np.allclose(found[name], array, rtol=0, atol=1e-6), name
        changed += not np.allclose(array, plain[name], rtol=0, atol=1e-3)
    assert changed == len([n for n in plain if _touched(n, to)])


def _touched(name: str, to: str) -> bool:
    """Whether the adapter changes this tensor, by its name."""
    words = {
        "tunix": ("q_einsum", "kv_einsum", "attn_vec", "gate_proj"),
        "deepmind": ("q_einsum", "kv_einsum", "attn_vec", "gating_einsum"),
        "maxtext": ("query/", "key/", "out/", "wi_0"),
    }[to.split("-")[0]]
    ours = any(word in name for word in words)
    # layers 0 and 3 are the first of the local and the last of the global ones
    one_a_layer = to in ("tunix", "deepmind", "maxtext-unscanned")
    return ours and (not one_a_layer or _layer(name) in LAYERS)


def _layer(name: str) -> int:
    import re

    found = re.search(r"layers?[._](\d+)", name)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("to", ["tunix", "maxtext-unscanned"])
def test_a_saved_norm_is_stored_as_the_layout_stores_norms(to: str) -> None:
    random = np.random.default_rng(5)
    norm = random.normal(0.4, 0.1, 10).astype(F32)
    name = "base_model.model.model.layers.2.input_layernorm.weight"
    saved = in_memory({name: norm}, modules_to_save=["input_layernorm"])
    base = memory(base_arrays(GEMMA2, "model.", F32), config=GEMMA2, source="base")
    target = arrays(convert(base, LAYOUTS[to], adapters=[adapter_source(saved)]).plan.target)
    plain = arrays(convert(base, LAYOUTS[to]).plan.target)
    (changed,) = [n for n in target if not np.array_equal(target[n], plain[n])]
    expected = norm + 1 if to.startswith("maxtext") else norm
    assert np.array_equal(target[changed], expected)


def test_a_saved_tensor_does_not_go_into_a_stack() -> None:
    name = "base_model.model.model.layers.2.input_layernorm.weight"
    saved = in_memory({name: np.ones(10, F32)}, modules_to_save=["input_layernorm"])
    base = memory(base_arrays(GEMMA2, "model.", F32), config=GEMMA2, source="base")
    with pytest.raises(AdapterError, match="layout maxtext stacks with other layers") as caught:
        convert(base, LAYOUTS["maxtext"], adapters=[adapter_source(saved)])
    assert caught.value.remedy == "write layout maxtext-unscanned"
