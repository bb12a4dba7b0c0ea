"""The command on real weights: a LoRA trained by Tunix on Gemma 3 270M, merged, against Tunix.

Run with ``pytest -m real -s tests/real``; the printed numbers are those of the documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.readers import open_orbax
from tests.checkpoints import arrays, assert_same_bits, run_cli
from tests.real import oracle
from tests.real.fixtures import GREEDY, Tunix, convert
from tests.real.gemma_270m import FACT, greedy_text
from tests.real.oracle import Array
from tests.real.tunix_lora import ALPHA, PAIRS

pytestmark = [
    pytest.mark.real,
    # Of flax, jax, optax and orbax inside Tunix; the command runs in a process of its own.
    pytest.mark.filterwarnings("ignore"),
]

# Logits here reach 50. Without any LoRA transformers and Tunix, both in float32, differ by up to
# 3e-4 (each is 1e-4 to 2.5e-4 away from float64), from the order of their sums; other CPUs sum in
# other orders. Half a percent of error in alpha gives 1e-1.
TOLERANCE = 1e-3
# Weights of 0.1 in float32: the sum over rank 8 and one addition, each rounded to 6e-8 or better.
WEIGHT_TOLERANCE = 1e-6
# One rounding of the weights moves logits by 0.3 at most and 0.02 on average: 99 % of the tokens
# were the same, and no choice was lost that float32 had made by more than 0.03.
BFLOAT16_AGREEMENT = 0.98
BFLOAT16_MARGIN = 0.1

Report = Callable[[str, "Comparison"], None]


@dataclass(frozen=True)
class Comparison:
    """How two sets of logits ``(tokens, vocabulary)`` of one prompt differ."""

    max_diff: float
    mean_diff: float
    largest_logit: float
    top1_agreement: float
    largest_margin_lost: float

    @classmethod
    def of(cls, found: Array, expected: Array) -> Comparison:
        """Compare logits; a margin is lost where another token than the expected one wins."""
        assert found.shape == expected.shape
        differences = np.abs(found - expected)
        lost = found.argmax(-1) != expected.argmax(-1)
        second, first = np.partition(expected, -2)[:, -2:].T
        return cls(
            max_diff=float(differences.max()),
            mean_diff=float(differences.mean()),
            largest_logit=float(np.abs(expected).max()),
            top1_agreement=float(1 - lost.mean()),
            largest_margin_lost=float((first - second)[lost].max(initial=0)),
        )

    def assert_equal(self) -> None:
        """The same within float32's own error; only an exact tie may fall the other way."""
        assert self.max_diff < TOLERANCE
        assert self.top1_agreement == 1 or self.largest_margin_lost < TOLERANCE


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """Print a comparison (seen with ``-s``) and keep it in the JUnit report."""

    def say(title: str, comparison: Comparison) -> None:
        record_property(title, json.dumps(asdict(comparison)))
        print(f"\n{title}: " + ", ".join(f"{k} {v:.3g}" for k, v in asdict(comparison).items()))

    return say


def compare(
    model: Any, expected: dict[str, Array], prompts: dict[str, list[int]], name: str
) -> Comparison:
    """Compare transformers' logits of one prompt with the expected ones."""
    return Comparison.of(oracle.hf_logits(model, prompts[name]), expected[name])


def test_the_base_knows_a_fact(base: Path) -> None:
    prompt, answer = FACT
    assert answer in greedy_text(base, prompt, 8)


@pytest.mark.parametrize("prompt", ["short", "long"])
def test_base_without_lora_is_the_yardstick(
    base: Path, tunix: Tunix, prompts: dict[str, list[int]], prompt: str, report: Report
) -> None:
    found = compare(oracle.hf_model(base), tunix.base, prompts, prompt)
    report(f"base, {prompt}", found)
    found.assert_equal()


@pytest.mark.parametrize("prompt", ["short", "long"])
def test_float32_merge_has_tunix_logits(
    merged_float32: Path, tunix: Tunix, prompts: dict[str, list[int]], prompt: str, report: Report
) -> None:
    found = compare(oracle.hf_model(merged_float32), tunix.merged, prompts, prompt)
    report(f"float32 merge, {prompt}", found)
    found.assert_equal()


@pytest.mark.parametrize("prompt", ["short", "long"])
def test_bfloat16_merge_chooses_tunix_tokens(
    merged_bfloat16: Path, tunix: Tunix, prompts: dict[str, list[int]], prompt: str, report: Report
) -> None:
    found = compare(oracle.hf_model(merged_bfloat16), tunix.merged, prompts, prompt)
    report(f"bfloat16 merge, {prompt}", found)
    assert found.top1_agreement >= BFLOAT16_AGREEMENT
    assert found.largest_margin_lost < BFLOAT16_MARGIN


@pytest.mark.parametrize("alpha", [0.0, ALPHA / 2, ALPHA * 1.00625])
def test_another_alpha_would_be_seen(
    base: Path, tunix: Tunix, prompts: dict[str, list[int]], alpha: float, report: Report
) -> None:
    wrong = oracle.merge(oracle.read_weights(base), tunix.factors, alpha)
    found = compare(oracle.hf_model(base, wrong), tunix.merged, prompts, "short")
    report(f"alpha {alpha:g} instead of {ALPHA:g}, short", found)
    assert found.max_diff > 50 * TOLERANCE


def test_every_pair_was_trained(tunix: Tunix) -> None:
    assert len(tunix.factors) == 2 * PAIRS
    assert all(np.any(factor != 0) for factor in tunix.factors.values())


def test_float32_weights_equal_the_oracle(base: Path, merged_float32: Path, tunix: Tunix) -> None:
    expected = oracle.merge(oracle.read_weights(base), tunix.factors, ALPHA)
    found = oracle.read_weights(merged_float32)
    assert found.keys() == expected.keys()
    worst = max(float(np.abs(found[name] - expected[name]).max()) for name in expected)
    print(f"\nfloat32 weights: largest difference from the oracle {worst:.3g}")
    assert worst < WEIGHT_TOLERANCE


def test_bfloat16_weights_are_rounded_once(base: Path, merged_bfloat16: Path, tunix: Tunix) -> None:
    expected = oracle.merge(oracle.read_weights(base), tunix.factors, ALPHA)
    found = oracle.read_weights(merged_bfloat16)
    assert found.keys() == expected.keys()
    differing = total = 0
    for name, exact in expected.items():
        rounded = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
        differing += int(np.count_nonzero(found[name] != rounded))
        total += exact.size
        # Half a unit in the last of 8 bits, and what float32 may have moved before the rounding.
        error = np.abs(found[name] - exact)
        assert np.all(error <= np.abs(exact) * 2**-8 + WEIGHT_TOLERANCE), name
    print(f"\nbfloat16 weights: {differing} of {total} round differently from the oracle's")
    # The float32 sums may differ in their last bit, which decides 2 roundings in a million.
    assert differing < total * 1e-5


def test_without_alpha_it_is_an_error(base: Path, lora: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    done = convert(lora, "--base", base, "--out", out)
    assert done.returncode == 1
    assert "cannot be guessed" in done.stderr
    assert "--alpha" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_output_loads_whole(dtype: str, request: pytest.FixtureRequest) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    directory = request.getfixturevalue(f"merged_{dtype}")
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    assert {problem: found for problem, found in info.items() if found} == {}
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert model.config.dtype == getattr(torch, dtype)


def test_greedy_text_equals_tunix(
    merged_float32: Path, tunix: Tunix, prompts: dict[str, list[int]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(merged_float32)
    model = oracle.hf_model(merged_float32)
    found = tokenizer.decode(oracle.hf_greedy(model, prompts["short"], GREEDY))
    print(f"\ngreedy: {found!r}")
    assert found == tokenizer.decode(tunix.greedy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_side_files_are_carried(base: Path, dtype: str, request: pytest.FixtureRequest) -> None:
    merged = request.getfixturevalue(f"merged_{dtype}")
    side = {file.name for file in base.iterdir() if not file.name.startswith("model")}
    assert side == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in side - {"config.json"}:
        assert (merged / name).read_bytes() == (base / name).read_bytes(), name
    ours, theirs = (json.loads((d / "config.json").read_text()) for d in (merged, base))
    assert ours == theirs | {"dtype": dtype}


@pytest.fixture(scope="module")
def exported(base: Path, lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained adapter as PEFT's."""
    out = tmp_path_factory.mktemp("peft") / "adapter"
    words = ["orbax-to-peft", lora, "--base", base, "--out", out, "--alpha", ALPHA, "--quiet"]
    assert run_cli(*words) == 0
    return out


def test_the_adapter_goes_to_peft_and_back(
    exported: Path, base: Path, lora: Path, tmp_path: Path
) -> None:
    out = tmp_path / "back"
    assert run_cli("peft-to-orbax", exported, "--base", base, "--out", out, "--quiet") == 0
    expected = arrays(open_orbax(lora))
    assert len(expected) == 2 * PAIRS
    assert_same_bits(arrays(open_orbax(out)), expected)


@pytest.mark.parametrize("prompt", ["short", "long"])
def test_peft_runs_the_adapter_as_tunix_does(
    exported: Path,
    base: Path,
    tunix: Tunix,
    prompts: dict[str, list[int]],
    prompt: str,
    report: Report,
) -> None:
    """Not merged: base and adapter in PEFT's own runtime."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(oracle.hf_model(base), exported).eval()
    found = compare(model, tunix.merged, prompts, prompt)
    report(f"adapter in PEFT, {prompt}", found)
    found.assert_equal()
