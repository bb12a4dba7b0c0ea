"""Merged weights against PEFT's own runtime, base and adapter not merged, on the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.job import Job
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, TUNIX
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.convert.writers.hf import write_hf
from gemma_convert.convert.writers.orbax import write_orbax
from gemma_convert.surgery.adapters.open import adapter_source
from tests import peft_oracle, tiny
from tests.peft_oracle import ALL_LINEAR

pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:tunix\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]

BOUND = 1e-4
"""Most that two float32 forwards may differ; these models' own float32 error is below 1e-5."""

SEEN = 100 * BOUND
"""Least by which the adapter must move the logits."""

LINEAR = {"r": 3, "lora_alpha": 7, "target_modules": ALL_LINEAR}
EVERYWHERE: dict[str, dict[str, Any]] = {
    "patterns": {
        **LINEAR,
        "rank_pattern": {"layers.1.self_attn.k_proj": 5, "up_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 11, "o_proj": 2},
    },
    "rslora": {**LINEAR, "use_rslora": True, "rank_pattern": {"q_proj": 5}},
    "dora": {**LINEAR, "use_dora": True, "rank_pattern": {"q_proj": 5}},
    "key alone": {"r": 3, "lora_alpha": 7, "target_modules": ["k_proj"]},
}
MODELS = ("gemma2", "gemma3", "gemma4", "gemma4-moe", "gemma4-e2b")
EMBEDDINGS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "kept tied": {
        "target_modules": ["q_proj", "embed_tokens", "lm_head"],
        "ensure_weight_tying": True,
    },
    "dora of both": {"target_modules": ["lm_head", "embed_tokens"], "use_dora": True},
    "saved": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "lm_head", "input_layernorm", "up_proj"],
    },
    "saved by the ends of names": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["tokens", "layernorm"],
    },
    "saved by the end of the head's": {"target_modules": ["q_proj"], "modules_to_save": ["head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved and kept tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
}
STAYS_TIED = ("kept tied", "saved and kept tied")
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "gate and up alone": {"target_parameters": ["experts.gate_up_proj"]},
    "down alone, router": {
        "target_parameters": ["experts.down_proj"],
        "target_modules": ["router.proj"],
    },
}


def adapted(case: str, config: dict[str, Any], directory: Path) -> Any:
    """PEFT's logits; base and adapter are left in ``directory`` as transformers and PEFT save."""
    model = tiny.hf_model(case)
    model.save_pretrained(directory / "base")
    before = tiny.hf_logits(model)
    peft = peft_oracle.peft_model(model, **config)
    peft_oracle.save(peft, directory / "adapter")
    logits = tiny.hf_logits(peft)
    assert np.abs(logits - before).max() > SEEN
    return logits


def merge(directory: Path, **options: Any) -> Job:
    adapter = adapter_source(open_checkpoint(directory / "adapter"))
    return convert(open_base(directory / "base"), HF, adapters=[adapter], **options)


def merged_logits(directory: Path) -> Any:
    out = directory / "out"
    out.mkdir()
    write_hf(merge(directory).plan.target, out, max_shard_bytes=10**9, progress=lambda _: None)
    return tiny.hf_logits(tiny.hf_loaded(out))


@pytest.mark.parametrize("option", EVERYWHERE)
@pytest.mark.parametrize("case", MODELS)
def test_linear_modules(case: str, option: str, tmp_path: Path) -> None:
    expected = adapted(case, EVERYWHERE[option], tmp_path)
    assert np.abs(merged_logits(tmp_path) - expected).max() < BOUND


@pytest.mark.parametrize("option", EMBEDDINGS)
def test_embedding_head_and_saved_modules(option: str, tmp_path: Path) -> None:
    """F13: what makes head and embedding differ unties them, in the config too."""
    expected = adapted("gemma3", {"r": 3, "lora_alpha": 7, **EMBEDDINGS[option]}, tmp_path)
    assert np.abs(merged_logits(tmp_path) - expected).max() < BOUND
    target = merge(tmp_path).plan.target
    tied = option in STAYS_TIED
    assert target.config.get("tie_word_embeddings", True) == tied
    assert ("lm_head.weight" in target) != tied


@pytest.mark.parametrize("option", EXPERTS)
def test_experts(option: str, tmp_path: Path) -> None:
    config = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj"], **EXPERTS[option]}
    expected = adapted("gemma4-moe", config, tmp_path)
    assert np.abs(merged_logits(tmp_path) - expected).max() < BOUND


def test_per_layer_embeddings(tmp_path: Path) -> None:
    modules = ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]
    config = {"r": 3, "lora_alpha": 7, "target_modules": [*modules, "embed_tokens_per_layer"]}
    expected = adapted("gemma4-e2b", config, tmp_path)
    assert np.abs(merged_logits(tmp_path) - expected).max() < BOUND


def test_into_tunix(tmp_path: Path) -> None:
    """Norms over whole rows, and a key without a value, in a layout that splits neither so."""
    modules = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
    config = {**LINEAR, "use_dora": True, "target_modules": modules}
    expected = adapted("gemma2", config, tmp_path)
    adapter = adapter_source(open_checkpoint(tmp_path / "adapter"))
    job = convert(open_base(tmp_path / "base"), TUNIX, adapters=[adapter])
    (tmp_path / "orbax").mkdir()
    write_orbax(job.plan.target, tmp_path / "orbax", block_bytes=1000)
    model = tiny.tunix_model("gemma2", seed=9)
    tiny.tunix_restore(model, tmp_path / "orbax")
    assert np.abs(tiny.tunix_logits(model) - expected).max() < BOUND


def test_jax_layouts_have_no_place_for_a_head_of_its_own(tmp_path: Path) -> None:
    adapted("gemma2", {"r": 3, "target_modules": ["embed_tokens"], "lora_alpha": 9}, tmp_path)
    adapter = adapter_source(open_checkpoint(tmp_path / "adapter"))
    with pytest.raises(AdapterError, match="of layout tunix have one array for both; write a Hug"):
        convert(open_base(tmp_path / "base"), TUNIX, adapters=[adapter])


def test_towers(tmp_path: Path) -> None:
    """An adapter of text and vision tower, which transformers names otherwise than its files do."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 64,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {
        "hidden_size": 12,
        "intermediate_size": 14,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 28,
        "patch_size": 14,
        "vision_use_head": False,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "base")
    modules = ["q_proj", "o_proj", "fc1", "out_proj"]
    peft = peft_oracle.peft_model(model, r=3, lora_alpha=7, target_modules=modules)
    peft_oracle.save(peft, tmp_path / "adapter")
    peft.merge_and_unload().save_pretrained(tmp_path / "merged")
    target, expected = merge(tmp_path).plan.target, open_base(tmp_path / "merged")
    base = open_base(tmp_path / "base")
    assert target.keys() == expected.keys() == base.keys()
    changed = 0
    for name, tensor in target.items():
        # weights below 1 in size; the products are summed in another order
        assert np.allclose(tensor.numpy(), expected[name].numpy(), rtol=0, atol=1e-6), name
        changed += not np.allclose(tensor.numpy(), base[name].numpy(), rtol=0, atol=1e-3)
    assert changed == 4 + 2 * 3


@pytest.mark.parametrize("pattern", ["q_proj", "q_proj.weight"])
def test_patterns_of_target_parameters(pattern: str, tmp_path: Path) -> None:
    """PEFT matches a target parameter's whole name: the module's alone means nothing to it."""
    config = {"target_modules": ["k_proj"], "target_parameters": ["q_proj.weight"], "r": 3}
    config |= {"lora_alpha": 7, "alpha_pattern": {pattern: 21}}
    expected = adapted("gemma3", config, tmp_path)
    scales = {q: s for q, s in merge(tmp_path).adapters[0].scales.items() if "q_proj" in q}
    assert set(scales.values()) == {7.0 if pattern.endswith("weight") else 7 / 3}
    assert np.abs(merged_logits(tmp_path) - expected).max() < BOUND


@pytest.mark.parametrize("parameter", ["embed_tokens.weight", "lm_head.weight"])
def test_a_lookup_as_a_target_parameter(parameter: str, tmp_path: Path) -> None:
    """PEFT then takes columns of the embedding for inputs, where its Embedding layer takes rows."""
    config = {"target_modules": ["k_proj"], "target_parameters": [parameter], "r": 3}
    expected = adapted("gemma3", {**config, "lora_alpha": 7}, tmp_path)
    assert np.abs(merged_logits(tmp_path) - expected).max() < BOUND


def test_magnitudes_of_a_tied_embedding_are_refused(tmp_path: Path) -> None:
    config = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "use_dora": True}
    adapted("gemma3", {**config, "r": 3, "lora_alpha": 7}, tmp_path)
    with pytest.raises(AdapterError, match="DoRA on the embedding under ensure_weight_tying"):
        merge(tmp_path)
