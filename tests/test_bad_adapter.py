"""Adapters that must not be merged, through the command line: exit 1, one line, nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.tensor import Array
from tests.checkpoints import (
    BF16,
    F32,
    GEMMA3,
    GEMMA4,
    base_arrays,
    factor_arrays,
    run_cli,
    snapshot,
    tunix_arrays,
    write_base,
    write_run,
)

SAMPLES = Path(__file__).parent / "data" / "orbax_samples"
SAMPLE = {
    **GEMMA3,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
Q, KV, K = (f"layers.1.attn.{x}_einsum.w_lora_" for x in ("q", "kv", "k"))


def refused(directory: Path, message: str, capsys: Any, *options: Any) -> None:
    before = snapshot(directory)
    words = ["orbax-to-hf", directory / "run", "--base", directory / "base"]
    assert run_cli(*words, "--out", directory / "out", *options) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", captured.err), captured.err
    assert captured.out == ""
    assert snapshot(directory) == before


def change(name: str, edit: Callable[[Array], Array]) -> Callable[[dict[str, Array]], Any]:
    return lambda factors: factors.update({name: edit(factors[name])})


def rename(old: str, new: str) -> Callable[[dict[str, Array]], None]:
    def apply(factors: dict[str, Array]) -> None:
        for side in "ab":
            factors[new + side] = factors.pop(old + side)

    return apply


def set_values(array: Array, *values: float) -> Array:
    array.reshape(-1)[: len(values)] = values
    return array


MISFITS: dict[str, tuple[Callable[[dict[str, Array]], Any], str]] = {
    "a module that the base lacks": (
        rename(Q, "layers.1.attn.x_einsum.w_lora_"),
        r"layers.1.attn.x_einsum.w: the base \(gemma3, 2 layers\) has no such module; give the base"
        " that the adapter was trained on",
    ),
    "a layer that the base lacks": (
        rename(Q, "layers.2.attn.q_einsum.w_lora_"),
        r"layers.2.attn.q_einsum.w: the base \(gemma3, 2 layers\) has no such module",
    ),
    "an adapter of a generation with k_einsum": (
        lambda factors: factors.update(
            {f"{K}a": np.ones((10, 2), BF16), f"{K}b": np.ones((2, 3, 7), BF16)}
        ),
        r"layers.1.attn.k_einsum.w: the base \(gemma3, 2 layers\) has no such module",
    ),
    "ranks that disagree": (
        change(f"{Q}b", lambda array: np.concatenate([array, array])),
        r"layers.1.attn.q_einsum.w: the factors disagree on the rank: A \[10, 2\] ends in r, "
        r"B \[4, 6, 7\] begins with r; they belong to different runs",
    ),
    "B of another width": (
        change(f"{KV}b", lambda array: array[..., :5]),
        r"kv_einsum.w_lora_b: expected \(r s k h\) = \[2, 2, 3, 7\] for this base, found "
        r"\[2, 2, 3, 5\]; give the base that the adapter was trained on",
    ),
    "A of another width": (
        change(f"{KV}a", lambda array: array[:9]),
        r"kv_einsum.w_lora_a: expected \(d r\) = \[10, 2\] for this base, found \[9, 2\]",
    ),
    "a factor alone": (
        lambda factors: factors.pop(f"{Q}b"),
        "layers.1.attn.q_einsum.w_lora_b is missing, its other factor is there",
    ),
    "NaN": (
        change(f"{Q}a", lambda array: set_values(array, np.nan, 1, np.nan)),
        "layers.1.attn.q_einsum.w_lora_a: 2 of 20 values are NaN or infinite; the run diverged",
    ),
    "infinity": (
        change(f"{Q}b", lambda array: set_values(array, -np.inf)),
        "layers.1.attn.q_einsum.w_lora_b: 1 of 84 values are NaN or infinite; the run diverged",
    ),
    "B all zero": (
        change(f"{Q}b", np.zeros_like),
        "q_einsum.w_lora_b is all zero: the pair changes nothing; is this the step that was meant",
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfit(tmp_path: Path, misfit: str, capsys: pytest.CaptureFixture[str]) -> None:
    harm, message = MISFITS[misfit]
    factors = factor_arrays(GEMMA3)
    harm(factors)
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    write_run(tmp_path / "run", factors)
    refused(tmp_path, message, capsys, "--alpha", 5)


def test_a_base_of_another_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 4's third layer is not in this Gemma 3; its others would fit."""
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    write_run(tmp_path / "run", factor_arrays(GEMMA4))
    message = r"layers.2.[a-z_.]+: the base \(gemma3, 2 layers\) has no such module, nor 5 more"
    refused(tmp_path, message, capsys, "--alpha", 5)


def test_a_tree_of_another_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    write_run(tmp_path / "run", tunix_arrays(GEMMA4))
    refused(tmp_path, "layers.0.skip_scale: no parameter of a gemma3 of 2 layers", capsys)


@pytest.mark.parametrize(
    ("metadata", "options", "message"),
    [
        (None, [], "alpha is not stored in the checkpoint, and it cannot be guessed: the factors"),
        ({"lora": {"rank": 2}}, [], "pass --alpha with the value of the training run"),
        ({"lora": {"alpha": 16}}, ["--alpha", 8], "metadata says alpha 16, --alpha says 8"),
        ({"lora_alpha": 16}, ["--alpha", 8], "metadata says alpha 16, --alpha says 8"),
        (None, ["--alpha", 0], "alpha is 0; pass a finite value above 0"),
        (None, ["--alpha", "nan"], "alpha is nan; pass a finite value above 0"),
    ],
)
def test_alpha(
    tmp_path: Path, metadata: Any, options: list[Any], message: str, capsys: Any
) -> None:
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    write_run(tmp_path / "run", factor_arrays(GEMMA3), metadata)
    refused(tmp_path, message, capsys, *options)


def test_a_tied_head_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = base_arrays(GEMMA3, "model.")
    values["lm_head.weight"] = values["model.embed_tokens.weight"].astype(F32)
    write_base(tmp_path / "base", GEMMA3, values)
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    message = "lm_head.weight differs from the embedding, but config.json ties them; set tie_word"
    refused(tmp_path, message, capsys, "--alpha", 5)


def test_factors_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_base(tmp_path / "base", GEMMA3, {})
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    message = (
        "base: no weights, and .* holds LoRA factors alone; give the directory with the base's"
    )
    refused(tmp_path, message, capsys, "--alpha", 5)
