"""PEFT as the reference: every tensor of an adapter has an effect, or none of them has."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.validation.engines.choose import Options, choose
from gemma_convert.convert.validation.engines.peft_adapter import placed
from tests import peft_oracle
from tests.checkpoints import run_cli
from tests.logits_pairs import compared, wheres

FILE = "adapter_model.safetensors"
Q = "layers.5.self_attn.q_proj"


@pytest.fixture(scope="module")
def adapter(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    out = tmp_path_factory.mktemp("peft")
    model = AutoModelForCausalLM.from_pretrained(deep, dtype=torch.float32)
    model = peft_oracle.peft_model(model, r=3, lora_alpha=7, target_modules=["q_proj"])
    return peft_oracle.save(model, out / "adapter")


def renamed(adapter: Path, out: Path, change: Callable[[str], str]) -> Path:
    """A copy whose tensors have other names; those that come to none are left out."""
    shutil.copytree(adapter, out)
    names = {change(name): array for name, array in load_file(adapter / FILE).items()}
    names.pop("", None)
    save_file(names, out / FILE, metadata={"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.model.layers", "base_model.model.model.language_model.layers"),
        ("base_model.model.model.layers", "base_model.model.language_model.model.layers"),
        ("base_model.model.model.layers", "module.base_model.model.model.layers"),
        (".weight", ".default.weight"),
    ],
)
def test_keys_of_other_classes_and_wrappers_are_applied(
    deep: Path, few: Path, adapter: Path, tmp_path: Path, old: str, new: str
) -> None:
    other = renamed(adapter, tmp_path / "other", lambda name: name.replace(old, new))
    result = compared(adapter, other, few, base=deep)
    assert result.passed, result.findings
    assert wheres(compared(other, deep, few, base=deep)) == ["prompt few, layer 0"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda name: name.replace("layers.5.", "layers.55."),
            "base_model.model.model.layers.55.self_attn.q_proj.lora_A.weight and 1 more: "
            "expected a place in Gemma3ForCausalLM for every tensor, found none in PEFT's layers; ",
        ),
        (
            lambda name: "" if name.endswith(f"{Q}.lora_B.weight") else name,
            f"expected base_model.model.model.{Q}.lora_B.default.weight, found other factors of "
            "that module alone; ",
        ),
    ],
)
def test_what_peft_would_leave_out_is_refused_before_weights_are_read(
    deep: Path, adapter: Path, tmp_path: Path, change: Callable[[str], str], told: str
) -> None:
    other = renamed(adapter, tmp_path / "other", change)
    source = choose(str(other), Options(base=deep))
    for attempt in (source.require_runnable, source.load):
        with pytest.raises(InputError) as caught:
            attempt()
        assert str(caught.value) == (
            f"{other}: {told}give the base that it was trained on, or merge it (surgery merge-lora)"
        )


def test_what_peft_itself_refuses_is_one_line(deep: Path, adapter: Path, tmp_path: Path) -> None:
    other = renamed(adapter, tmp_path / "other", str)
    config = other / "adapter_config.json"
    config.write_text(re.sub('"q_proj"', '"qq_proj"', config.read_text()))
    with pytest.raises(InputError, match=r"PEFT does not load it: NoMatching.*qq_proj"):
        choose(str(other), Options(base=deep)).require_runnable()


def test_a_module_without_factors_stays_as_it_is(
    deep: Path, few: Path, adapter: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does PEFT remark on it, where nothing is to be told."""
    other = renamed(adapter, tmp_path / "other", lambda n: n if f"{Q}." in n else "")
    check = ["validate", "logits", other, deep, "--base", deep, "--prompts", few, "--quiet"]
    assert run_cli(*check) == 1
    assert "adapter keys" not in capfd.readouterr().err
    assert wheres(compared(other, deep, few, base=deep)) == ["prompt few, layer 5"]


def test_two_tensors_of_one_name() -> None:
    one, two = f"base_model.model.model.{Q}.lora_A", f"model.language_model.{Q}.lora_A.default"
    values = {f"{name}.weight": np.ones(2) for name in (one, two)}
    with pytest.raises(ValueError, match="another tensor stands for the same weight"):
        placed(values, [f"model.{Q}.weight"])
