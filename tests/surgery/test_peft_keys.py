"""Names in PEFT adapters: wrappers, prefixes, adapter names; the same module whatever they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF
from gemma_convert.surgery.adapters.open import adapter_source
from gemma_convert.surgery.adapters.peft import read_peft
from gemma_convert.surgery.adapters.peft_keys import Key, read_key, weight_name
from tests.checkpoints import (
    F32,
    GEMMA3,
    PREFIXES,
    arrays,
    assert_same_bits,
    base_arrays,
    memory,
)
from tests.peft_files import factors, in_memory

Q = "layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    "name",
    [
        f"base_model.model.model.{Q}.lora_A.weight",
        f"base_model.model.model.{Q}.lora_A.default.weight",
        f"base_model.model.model.{Q}.lora_A.my_adapter.weight",
        f"model.{Q}.lora_A.weight",
        f"{Q}.lora_A.weight",
        f"_orig_mod.base_model.model.model.{Q}.lora_A.default.weight",
        f"base_model.model._orig_mod.model.{Q}.lora_A.weight",
        f"base_model.model._orig_module.model.{Q}._orig_module.lora_A.weight",
        f"module.base_model.model.model.{Q}.lora_A.weight",
        f"_fsdp_wrapped_module.base_model.model.model.{Q}.lora_A.weight",
        f"base_model.model.base_model.model.model.{Q}.lora_A.weight",
        f"pretrained_model.base_model.model.model.{Q}.lora_A.default.weight",
        f"base_model.model.model.language_model.{Q}.lora_A.weight",
        f"base_model.model.language_model.model.{Q}.lora_A.weight",
        f"base_model.model.model.language_model.{Q}._checkpoint_wrapped_module.lora_A.weight",
    ],
)
def test_wrappers_do_not_change_the_module(name: str) -> None:
    key = read_key(name)
    assert (key.factor, key.depth) == ("a", 0)
    assert weight_name(f"{key.module}.weight") == f"{Q}.weight"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (f"{Q}.lora_B.weight", Key(Q, "b")),
        (f"{Q}.lora_B.default.weight", Key(Q, "b", "default")),
        (f"{Q}.lora_B.default.bias", Key(Q, "bias", "default")),
        (f"{Q}.lora_B.bias", Key(Q, "bias")),
        (f"{Q}.lora_magnitude_vector", Key(Q, "magnitude")),
        (f"{Q}.lora_magnitude_vector.default.weight", Key(Q, "magnitude", "default")),
        ("embed_tokens.lora_embedding_A", Key("embed_tokens", "a")),
        ("embed_tokens.lora_embedding_B.default", Key("embed_tokens", "b", "default")),
        ("experts.base_layer.lora_A.weight", Key("experts", "a", None, 1)),
        ("experts.lora_A.weight", Key("experts", "a")),
        ("norm.weight", Key("norm.weight", "saved")),
        ("lm_head.base_layer.weight", Key("lm_head.weight", "saved")),
        (
            "lm_head.modules_to_save.default.weight",
            Key("lm_head.weight", "saved", "default", 0, True),
        ),
        ("lm_head.original_module.weight", Key("lm_head.weight", "original")),
    ],
)
def test_what_a_key_says(name: str, key: Key) -> None:
    assert read_key(name) == key


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.language_model.norm.weight", "norm.weight"),
        ("language_model.model.layers.0.layer_scalar", "layers.0.layer_scalar"),
        ("model.layers.0.experts.gate_up_proj", "layers.0.experts.gate_up_proj"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("vision_tower.vision_model.post_layernorm.weight", "vision_tower.post_layernorm.weight"),
        ("model.vision_tower.post_layernorm.weight", "vision_tower.post_layernorm.weight"),
    ],
)
def test_one_name_for_one_weight(path: str, name: str) -> None:
    assert weight_name(path) == name


@pytest.mark.parametrize(("ours", "theirs"), [*itertools.product(PREFIXES, repeat=2)])
def test_an_adapter_under_any_prefix_fits_a_base_under_any_other(ours: str, theirs: str) -> None:
    """F08: nine equal results, by PEFT's own names; pairs found = applied = changed."""
    a, b = factors(Q, 10, 42).values()
    spelled = dict(zip(factors(f"{theirs}{Q}", 10, 42), (a, b), strict=True))
    base = base_arrays(GEMMA3, ours, F32)
    job = convert(
        memory(base, config=GEMMA3, source="base"),
        HF,
        adapters=[adapter_source(in_memory(spelled))],
    )
    # the output is named as config.json asks for, that of a text model
    found = {n.removeprefix("model."): array for n, array in arrays(job.plan.target).items()}
    base = {name.removeprefix(ours): array for name, array in base.items()}
    expected = base.pop(f"{Q}.weight") + 2.5 * (b @ a)
    assert np.allclose(found.pop(f"{Q}.weight"), expected, rtol=0, atol=1e-6)  # |delta| < 10
    assert_same_bits(found, base)
    merged = [name for name, action in job.plan.actions.items() if action == "merged"]
    assert merged == [f"model.{Q}.weight"]


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.1.self_attn.qkv_proj",  # fused by a server
        "model.layers.2.self_attn.q_proj",
        "model.layers.1.mlp.experts.0.gate_proj",
        "model.decoder.layers.1.self_attn.q_proj",
        "score",
    ],
)
def test_keys_that_match_nothing_are_refused(path: str) -> None:
    values = {**factors(f"model.{Q}", 10, 42), **factors(path, 10, 42)}
    base = memory(base_arrays(GEMMA3, "model."), config=GEMMA3, source="base")
    with pytest.raises(AdapterError, match=r"\(gemma3, 2 layers\) has no such module") as caught:
        convert(base, HF, adapters=[adapter_source(in_memory(values))])
    assert path.split(".")[-1] in str(caught.value)


def test_incomplete_and_doubled_files() -> None:
    values = factors(f"model.{Q}", 10, 42)
    a, b = values
    with pytest.raises(AdapterError, match="q_proj: its B is missing, the others are there"):
        read_peft(in_memory({a: values[a]}))
    with pytest.raises(AdapterError, match=r"A \[2, 10\] begins with r, B \[42, 3\] ends in r"):
        read_peft(in_memory({a: values[a], b: np.ones((42, 3), F32)}))
    twice = {**values, a.replace(".weight", ".default.weight"): values[a]}
    with pytest.raises(AdapterError, match="another tensor of the file stands for the same weight"):
        read_peft(in_memory(twice))
    named = [
        {name.replace(".weight", f".{word}.weight"): v for name, v in factors(p, 10, 42).items()}
        for word, p in (("math", f"model.{Q}"), ("style", "model.layers.0.self_attn.q_proj"))
    ]
    with pytest.raises(AdapterError, match="it holds several adapters: math, style"):
        read_peft(in_memory({**named[0], **named[1]}))
    with pytest.raises(AdapterError, match="its magnitude is missing"):
        read_peft(in_memory(values, use_dora=True))
    magnitude = {a.replace("lora_A.weight", "lora_magnitude_vector"): np.ones(42, F32)}
    with pytest.raises(AdapterError, match=r"it has a magnitude, but .* says no use_dora"):
        read_peft(in_memory({**values, **magnitude}))
    with pytest.raises(AdapterError, match="B has a bias"):
        read_peft(in_memory({**values, b.replace("weight", "bias"): np.ones(42, F32)}))


def test_factors_that_are_no_matrices_of_the_model() -> None:
    """Of a tower's patches and positions; a square table would fit either way round."""
    patches = "base_model.model.model.vision_tower.embeddings.patch_embedding.lora_"
    values = {
        f"{patches}A.weight": np.ones((2, 3, 5, 5)),
        f"{patches}B.weight": np.ones((7, 2, 1, 1)),
    }
    with pytest.raises(AdapterError) as caught:
        read_peft(in_memory(values))
    assert str(caught.value) == (
        "run: model.vision_tower.embeddings.patch_embedding: A [2, 3, 5, 5] and B [7, 2, 1, 1] are "
        "factors of a convolution, expected matrices; merge it with PEFT itself"
    )
    places = "base_model.model.model.vision_tower.embeddings.position_embedding.lora_embedding_"
    values = {f"{places}A": np.ones((2, 9)), f"{places}B": np.ones((9, 2))}
    with pytest.raises(AdapterError) as caught:
        read_peft(in_memory(values))
    assert str(caught.value) == (
        f"run: {places}A: factors of an embedding outside the text model; merge it with PEFT itself"
    )


@pytest.mark.parametrize("version", [None, "0.17.1", "0.18.0", "0.21.2"])
def test_the_scale_of_an_embedding_in_old_versions_is_not_known(version: str | None) -> None:
    """It was the root of the width less: 25 for Gemma 3 270M."""
    stem = "base_model.model.model.embed_tokens.lora_embedding_"
    values = {f"{stem}A": np.ones((2, 23)), f"{stem}B": np.ones((10, 2))}
    adapter = in_memory(values, **({"peft_version": version} if version else {}))
    if version in ("0.18.0", "0.21.2"):
        assert read_peft(adapter).scales == {"embed_tokens.weight": 2.5}
        return
    with pytest.raises(AdapterError, match=f"{stem}A: PEFT before 0.18 did not multiply") as caught:
        read_peft(adapter)
    assert "else divide lora_embedding_B by that root first" in str(caught.value)


@pytest.mark.parametrize("word", ["lora_E", "lora_a", "lora_embedding_C.default", "lora_ranknum"])
def test_factors_of_other_methods_are_no_weights(word: str) -> None:
    values = {
        **factors(f"model.{Q}", 10, 42),
        f"base_model.model.model.{Q}.{word}": np.ones(3, F32),
    }
    with pytest.raises(
        AdapterError, match=rf"q_proj.{word}: {word.partition('.')[0]} is no factor of LoRA"
    ):
        read_peft(in_memory(values))
