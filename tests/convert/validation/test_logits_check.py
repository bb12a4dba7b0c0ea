"""Two engines on the same ids: right pairs pass, each planted fault fails and is located."""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.validation.engines.choose import Options, choose
from gemma_convert.convert.validation.result import Result
from gemma_convert.convert.validation.setup_logits import Request, compare_logits
from tests import peft_oracle
from tests.logits_pairs import Spoil, compared, ids, norm_off_by_one, spoilt, wheres, with_config

SHORT, LONG = 4, 700


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.json"
    listed = [{"name": "short", "ids": ids(SHORT)}, {"name": "long", "ids": ids(LONG)}]
    path.write_text(json.dumps(listed))
    return path


def exchange(one: str, other: str) -> Spoil:
    def change(weights: dict[str, Array]) -> None:
        weights[one], weights[other] = weights[other], weights[one]

    return change


def exchange_layers(weights: dict[str, Array]) -> None:
    for name in [name for name in weights if "layers.10." in name]:
        exchange(name, name.replace("layers.10.", "layers.2."))(weights)


def vocabulary_shifted(weights: dict[str, Array]) -> None:
    name = "model.embed_tokens.weight"
    weights[name] = np.roll(weights[name], 64, axis=0)


SPOILT: dict[str, tuple[Spoil, str]] = {
    "k and v swapped in layer 4": (
        exchange(*(f"model.layers.4.self_attn.{x}_proj.weight" for x in "kv")),
        "layer 4",
    ),
    "one norm off by 1": (norm_off_by_one, "layer 7"),
    "layers 10 and 2 swapped": (exchange_layers, "layer 2"),
    "vocabulary rows shifted by 64": (vocabulary_shifted, "before the first layer"),
}


def test_the_same_directory_passes(deep: Path, prompts: Path) -> None:
    result = compared(deep, deep, prompts)
    assert result.passed
    assert result.data["worst"] == {"max_abs": 0.0, "mean_kl": 0.0, "top1": 1.0}
    assert [p["compared"] for p in result.data["prompts"]] == [SHORT, 512]


@pytest.mark.parametrize("fault", SPOILT)
def test_a_fault_in_the_weights_is_located(
    fault: str, deep: Path, prompts: Path, tmp_path: Path
) -> None:
    change, where = SPOILT[fault]
    wrong = spoilt(deep, tmp_path / "wrong", change)
    found = wheres(compared(deep, wrong, prompts))
    assert found == [f"prompt short, {where}", f"prompt long, {where}"]


def gate_and_up_swapped(weights: dict[str, Array]) -> None:
    name = "model.layers.1.experts.gate_up_proj"
    half = weights[name].shape[1] // 2
    weights[name][3] = np.roll(weights[name][3], half, axis=0)


def scalar_lost(weights: dict[str, Array]) -> None:
    weights["model.layers.0.layer_scalar"][...] = 1.0


@pytest.mark.parametrize(
    ("change", "where"), [(gate_and_up_swapped, "layer 1"), (scalar_lost, "layer 0")]
)
def test_a_fault_of_gemma4_is_located(
    change: Spoil, where: str, experts: Path, prompts: Path, tmp_path: Path
) -> None:
    wrong = spoilt(experts, tmp_path / "wrong", change)
    found = wheres(compared(experts, wrong, prompts))
    assert f"prompt long, {where}" in found


def test_the_rope_of_global_layers_shows_in_the_long_prompt_alone(
    deep: Path, prompts: Path, tmp_path: Path
) -> None:
    """A base frequency some percent off turns near positions by next to nothing."""

    def change(config: dict[str, Any]) -> None:
        config["rope_parameters"]["full_attention"]["rope_theta"] *= 1.02

    wrong = with_config(deep, tmp_path / "wrong", change)
    assert wheres(compared(deep, wrong, prompts)) == ["prompt long, layer 5"]


def test_the_query_scale_shows_in_the_first_layer(
    deep: Path, prompts: Path, tmp_path: Path
) -> None:
    def change(config: dict[str, Any]) -> None:
        config["query_pre_attn_scalar"] = 60

    wrong = with_config(deep, tmp_path / "wrong", change)
    found = wheres(compared(deep, wrong, prompts))
    assert found == ["prompt short, layer 0", "prompt long, layer 0"]


def test_bfloat16_passes_by_its_own_limits_and_fails_those_of_float32(
    deep: Path, few: Path
) -> None:
    def run(**limits: float) -> Result:
        from gemma_convert.convert.validation.verdict import Overrides

        options = Options(), Options(dtype="bfloat16")
        return compare_logits(
            Request(str(deep), str(deep), *options, few, limits=Overrides(**limits))
        )

    # a random model has small leads, so rounding may take some of 14
    result = run(top1=0.8)
    assert result.passed, result.findings
    assert result.data["limits"]["dtype"] == "bfloat16"
    assert not run(max_abs=2e-3, mean_kl=1e-6).passed


def test_peft_on_a_base_against_its_own_merge(deep: Path, few: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(deep, dtype=torch.float32)
    targets = ["q_proj", "down_proj"]
    model = peft_oracle.peft_model(model, r=3, lora_alpha=7, target_modules=targets)
    peft_oracle.save(model, tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    result = compared(tmp_path / "adapter", tmp_path / "merged", few, base=deep)
    assert result.passed, result.findings
    assert result.data["a"]["kind"] == "peft"
    # without the adapter it is another model
    assert wheres(compared(tmp_path / "adapter", deep, few, base=deep)) == ["prompt few, layer 0"]


def test_layers_left_on_the_disk_give_the_same_logits(
    deep: Path, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = Options(), Options(low_memory=True)
    result = compare_logits(Request(str(deep), str(deep), *given, few, layers=True))
    assert result.passed
    assert result.data["worst"]["max_abs"] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_load_leaves_no_layers_behind(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    shutil.copytree(deep, tmp_path / "wrong")
    weights = load_file(tmp_path / "wrong" / "model.safetensors")
    del weights["model.layers.7.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "wrong" / "model.safetensors", metadata={"format": "pt"})
    right = choose(str(deep), Options(low_memory=True)).load()
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    with pytest.raises(InputError, match="transformers says missing keys"):
        choose(str(tmp_path / "wrong"), Options(low_memory=True)).load()
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    del right
    gc.collect()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_low_memory_with_an_adapter_is_refused(deep: Path, few: Path, tmp_path: Path) -> None:
    """PEFT renames tensors in the files that layers are read from: the user's own."""
    before = (deep / "model.safetensors").read_bytes()
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "adapter_model.safetensors")
    given = Options(base=deep, low_memory=True)
    with pytest.raises(InputError, match="--low-memory does not go with an adapter"):
        compare_logits(Request(str(tmp_path), str(deep), given, Options(), few))
    assert (deep / "model.safetensors").read_bytes() == before
