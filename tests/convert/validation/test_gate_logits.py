"""Logits as a gate: what they are compared with, and what cannot be compared is told at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.layouts import TUNIX, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.random_model import random_factors
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array, Box
from gemma_convert.convert.validation import setup_logits
from gemma_convert.convert.validation.engines import packages
from gemma_convert.convert.validation.prompts import Prompt
from gemma_convert.surgery.delta import LowRank
from tests import peft_oracle, tiny
from tests.checkpoints import arrays, run_cli, write_run
from tests.tiny_cases import CASES
from tests.tiny_tokenizer import save_tokenizer

# Tunix 0.1.7 calls deprecated parts of jax 0.10 and flax 0.12.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:tunix\."),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:qwix\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]

ALPHA = 5.0


IDS = (2, *range(5, 18))


@pytest.fixture(autouse=True)
def one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the built-in ones, of several lengths, each of which jax would compile."""
    monkeypatch.setattr(setup_logits, "built_in", lambda *told: [Prompt("few", IDS)])


def save(case: str, directory: Path, **tokenizer: Any) -> Path:
    import transformers

    config = getattr(transformers, CASES[case].hf_class)(**CASES[case].hf_config)
    tiny.hf_random(config, 0).save_pretrained(directory)
    save_tokenizer(directory, **tokenizer)
    return directory


def factors(base: Path, out: Path, seed: int = 1) -> Path:
    model = read_model(json.loads((base / "config.json").read_text()), families())
    kind = np.dtype(np.float32)
    return write_run(out, arrays(random_factors(model, Spelling(TUNIX, ""), 2, kind, seed)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gemma3", tmp_path_factory.mktemp("gate") / "base")


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    return factors(base, base.parent / "run")


@pytest.fixture(scope="module")
def peft_adapter(base: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = ["q_proj", "down_proj"]
    adapted = peft_oracle.peft_model(model, r=3, lora_alpha=7, target_modules=targets)
    return peft_oracle.save(adapted, base.parent / "peft")


def verdict(out: Path) -> dict[str, Any]:
    (found,) = json.loads((out / "validation.json").read_text())
    assert found["passed"]
    return dict(found["summary"])


CHECK = ["--validate", "logits", "--quiet"]


def test_a_tunix_adapter_onto_a_directory(base: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["surgery", "merge-lora", base, run, "--alpha", ALPHA, "--out", out]
    assert run_cli(*words, *CHECK) == 0
    assert "by tunix in float32" in verdict(out)["A"]


def test_a_peft_adapter_onto_a_directory(base: Path, peft_adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["surgery", "merge-lora", base, peft_adapter, "--out", out]
    assert run_cli(*words, *CHECK) == 0
    assert "by peft in float32" in verdict(out)["A"]


def test_an_output_of_tunix(base: Path, peft_adapter: Path, tmp_path: Path) -> None:
    """Transformers runs the adapter, Tunix's model what was merged."""
    out = tmp_path / "out"
    words = ["convert", base, "--adapter", peft_adapter, "--to", "tunix", "--out", out]
    assert run_cli(*words, *CHECK) == 0
    assert "by peft" in verdict(out)["A"]
    assert "by tunix" in verdict(out)["B"]


@pytest.mark.parametrize("as_adapter", [False, True])
def test_a_base_quantised_as_for_training(
    as_adapter: bool, base: Path, run: Path, tmp_path: Path
) -> None:
    """Onto the full base the same factors predict something else."""
    out = tmp_path / "out"
    source = [base, "--adapter", run] if as_adapter else [run, "--base", base]
    words = ["convert", *source, "--to", "hf", "--alpha", ALPHA, "--out", out]
    assert run_cli(*words, "--base-quantization", "int8", *CHECK) == 0
    assert "factors applied" in verdict(out)["A"]
    full = ["validate", "logits", run, out, "--base", base, "--alpha", ALPHA]
    assert run_cli(*full, "--prompts", few(tmp_path), "--quiet") == 1


def few(directory: Path) -> Path:
    path = directory / "few.json"
    path.write_text(json.dumps([{"name": "few", "ids": list(IDS)}]))
    return path


def test_a_wrong_merge_is_rejected(
    base: Path, peft_adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LowRank.read

    def wrong(tensor: LowRank, box: Box) -> Array:
        return 2 * read(tensor, box)

    monkeypatch.setattr(LowRank, "read", wrong)
    out = tmp_path / "out"
    assert run_cli("surgery", "merge-lora", base, peft_adapter, "--out", out, *CHECK) == 1
    assert (tmp_path / "out.rejected").is_dir()


def refused(words: list[Any], capsys: pytest.CaptureFixture[str], out: Path) -> str:
    """What is said, and that nothing was written before."""
    capsys.readouterr()
    before = sorted(out.parent.iterdir())
    assert run_cli(*words, "--out", out, *CHECK) == 1
    assert sorted(out.parent.iterdir()) == before
    told = capsys.readouterr().err
    assert "a bug here" not in told
    return told


def test_what_no_engine_runs(
    base: Path, run: Path, peft_adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, alpha = tmp_path / "out", ["--alpha", ALPHA]
    both = ["surgery", "merge-lora", base, run, peft_adapter, *alpha]
    assert "no engine applies 2 adapters" in refused(both, capsys, out)
    half = ["surgery", "merge-lora", base, run, *alpha, "--weight", 0.5]
    assert "or one with a weight" in refused(half, capsys, out)
    assert (
        run_cli("hf-to-orbax", base, "--layout", "tunix", "--out", tmp_path / "tunix", "--quiet")
        == 0
    )
    onto = ["orbax-to-hf", tmp_path / "tunix", "--base", base, "--adapter", peft_adapter]
    assert "to an Orbax checkpoint here" in refused(onto, capsys, out)


def test_experts_that_tunix_gets_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save("gemma4-moe", tmp_path / "base")
    words = ["orbax-to-hf", factors(base, tmp_path / "run"), "--base", base, "--alpha", ALPHA]
    told = refused(words, capsys, tmp_path / "out")
    assert "feeds the router of experts otherwise" in told


def test_no_tokenizer_or_one_without_bos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save("gemma3", tmp_path / "base", bos=False)
    words = ["orbax-to-hf", factors(base, tmp_path / "run"), "--base", base, "--alpha", ALPHA]
    told = refused(words, capsys, tmp_path / "out")
    assert "does not put exactly one BOS (2) before text" in told
    for path in base.glob("*token*"):
        path.unlink()
    assert "has a tokenizer" in refused(words, capsys, tmp_path / "out")


def test_missing_packages_and_a_config_that_transformers_refuses(
    base: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["orbax-to-hf", run, "--base", base, "--alpha", ALPHA]
    found = packages.find_spec
    for missing, extra in (("qwix", "train"), ("torch", "validate")):
        monkeypatch.setattr(
            packages, "find_spec", lambda n, m=missing: found(n) if n != m else None
        )
        told = refused(words, capsys, tmp_path / "out")
        assert (
            f"the package {missing} is not installed; pip install 'gemma-convert[{extra}]'" in told
        )
    monkeypatch.setattr(packages, "find_spec", found)
    from transformers import Gemma3ForCausalLM

    def refuse(model: Any, config: Any) -> None:
        raise ValueError("no such attention")

    monkeypatch.setattr(Gemma3ForCausalLM, "__init__", refuse)
    told = refused(words, capsys, tmp_path / "out")
    assert "transformers makes no model of it: ValueError: no such attention" in told
