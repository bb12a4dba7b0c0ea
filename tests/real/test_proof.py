"""Validation on real weights: Gemma 3 270M through every layout, its merge, and its logits.

Run with ``pytest -m real -s tests/real/test_proof.py``; the printed numbers are those of
docs/validation.md.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from gemma_convert.convert.layouts import LAYOUTS
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.validation.diff import diff
from gemma_convert.convert.validation.roundtrip import validate_roundtrip
from tests.real.tunix_lora import ALPHA, RANK, SENTENCES

pytestmark = [
    pytest.mark.real,
    # Of flax, jax, optax and orbax inside Tunix; the commands run in processes of their own.
    pytest.mark.filterwarnings("ignore"),
]

MERGED_TENSORS = 7 * 18
SHORT_OF_ALL = ["--positions", "128"]


def validate(*words: str | Path) -> tuple[int, dict[str, Any]]:
    """Run ``gemma-convert validate ... --json`` as a user would."""
    command = [sys.executable, "-m", "gemma_convert", "validate", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def say(title: str, result: dict[str, Any]) -> None:
    print(f"\n{title}: " + "; ".join(f"{k}: {v}" for k, v in result["summary"].items()))
    for prompt in result.get("prompts", ()):
        keys = ("prompt", "tokens", "compared", "max_abs", "mean_abs", "mean_kl", "top1_agreement")
        told = {key: prompt[key] for key in (*keys, "perplexity_a", "perplexity_b")}
        print("  " + ", ".join(f"{k} {v:.3g}" if k[0] != "p" else f"{v}" for k, v in told.items()))


def test_every_layout_gives_back_every_bit(base: Path) -> None:
    result = validate_roundtrip(open_checkpoint(base))
    say("roundtrip", result.json())
    assert result.passed, result.findings
    assert {"tunix", "deepmind"} <= set(result.data["via"]) <= LAYOUTS.keys()
    assert len(result.data["tensors"]) == 236 * len(result.data["via"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_merged_weight_is_the_rounded_sum(
    dtype: str, base: Path, lora: Path, request: pytest.FixtureRequest
) -> None:
    merged = request.getfixturevalue(f"merged_{dtype}")
    given = ["--base", base, "--adapter", lora, "--alpha", f"{ALPHA:g}", "--all"]
    code, result = validate("merged", merged, *given)
    say(f"merged, {dtype}", result)
    assert code == 0
    assert len(result["tensors"]) == MERGED_TENSORS
    lost = [row["relative_error"] for row in result["tensors"].values()]
    print(f"  relative error of the realised change: {min(lost):.3g} to {max(lost):.3g}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_diff_to_the_base_is_a_lora_of_its_rank(
    dtype: str, base: Path, request: pytest.FixtureRequest
) -> None:
    merged = open_checkpoint(request.getfixturevalue(f"merged_{dtype}"))
    result = diff(open_checkpoint(base), merged)
    ranks = [row["rank"] for row in result.data["tensors"] if row["rank"] is not None]
    assert ranks == [RANK] * MERGED_TENSORS
    told = dict(result.summary)["LoRA"]
    assert told == f"{MERGED_TENSORS} of {MERGED_TENSORS} changed matrices look like one: rank 8"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_tunix_and_of_the_merge(
    dtype: str, base: Path, lora: Path, request: pytest.FixtureRequest
) -> None:
    """All built-in prompts: beyond the sliding window of 512, and past 2000 tokens."""
    merged = request.getfixturevalue(f"merged_{dtype}")
    given = ["--base", base, "--alpha", f"{ALPHA:g}", "--layers"]
    code, result = validate("logits", lora, merged, *given)
    say(f"logits, Tunix with factors against the merge in {dtype}", result)
    assert code == 0
    assert result["limits"]["dtype"] == dtype
    assert [p["prompt"] for p in result["prompts"]] == [
        "short",
        "code",
        "languages",
        "window",
        "long",
    ]
    assert result["prompts"][-1]["tokens"] > 2000


def test_bfloat16_arithmetic_stays_within_its_limits(base: Path) -> None:
    code, result = validate("logits", base, base, "--dtype-b", "bfloat16")
    say("logits, the base in float32 against bfloat16", result)
    assert code == 0


def spoilt(right: Path, out: Path, change: Any) -> Path:
    """A copy of a one-file directory with other weights."""
    shutil.copytree(right, out)
    path = out / "model.safetensors"
    weights = load_file(path)
    change(weights)
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})
    return out


def test_k_and_v_swapped_in_one_layer(merged_bfloat16: Path, tmp_path: Path) -> None:
    """Found with the limits of bfloat16 too, and located."""
    names = [f"model.layers.11.self_attn.{x}_proj.weight" for x in "kv"]

    def change(weights: dict[str, Any]) -> None:
        weights[names[0]], weights[names[1]] = weights[names[1]], weights[names[0]]

    wrong = spoilt(merged_bfloat16, tmp_path / "wrong", change)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"name": "text", "text": SENTENCES[0]}]))
    words = ["--layers", "--dtype-b", "bfloat16", "--prompts", prompts]
    code, result = validate("logits", merged_bfloat16, wrong, *words)
    say("logits, k and v swapped in layer 11", result)
    assert code == 1
    assert [f["where"] for f in result["findings"]] == ["prompt text, layer 11"]


def test_the_gate_with_all_three(base: Path, lora: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    given = ["--base", base, "--alpha", f"{ALPHA:g}", "--out", out]
    command = [sys.executable, "-m", "gemma_convert", "orbax-to-hf", lora, *given]
    command += ["--validate", "roundtrip,merged,logits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"{check}: passed" in done.stderr for check in ("roundtrip", "merged", "logits"))
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_another_theta_shows_in_the_long_prompt(base: Path, tmp_path: Path) -> None:
    """A config with another RoPE for the global layers than the model was trained with."""
    other = tmp_path / "base"
    shutil.copytree(base, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["full_attention"]["rope_theta"] = 1e4
    (other / "config.json").write_text(json.dumps(config))
    code, result = validate("logits", base, other, "--layers", *SHORT_OF_ALL)
    say("logits, theta of the global layers 1e4 instead of 1e6", result)
    assert code == 1
    assert result["findings"][-1]["where"] == "prompt long, layer 5"
    kl = {p["prompt"]: p["mean_kl"] for p in result["prompts"]}
    assert kl["long"] > 10 * kl["short"]
    assert np.isfinite(kl["long"])
