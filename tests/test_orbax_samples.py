"""Checkpoints that Tunix itself saved (google-tunix 0.1.7, Gemma 3 of two layers, rank 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.tensor import Array
from tests import lora_oracle
from tests.checkpoints import (
    GEMMA3,
    arrays,
    assert_same_bits,
    read_hf,
    run_cli,
    write_base,
    write_run,
)

SAMPLES = Path(__file__).parent / "data" / "orbax_samples"
CONFIG: dict[str, Any] = {
    **GEMMA3,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
ALPHA = 3.0


def convert(directory: Path, run: Path, base: Path, *options: Any) -> dict[str, Array]:
    out = directory / "out"
    words = ["orbax-to-hf", run, "--base", base, "--out", out, "--quiet"]
    assert run_cli(*words, *options) == 0
    return read_hf(out)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples' base as a Hugging Face directory; its config came from one without weights."""
    directory = tmp_path_factory.mktemp("plain")
    write_base(directory / "config", CONFIG, {})
    convert(directory, SAMPLES / "full_base", directory / "config")
    return directory / "out"


def rounded(values: dict[str, Array]) -> dict[str, Array]:
    return {
        name: lora_oracle.rounded_to_bfloat16(array) if array.dtype == np.float64 else array
        for name, array in values.items()
    }


def trained(sample: str) -> dict[str, Array]:
    """What a sample holds. Its run took no step, so B, which is all zero, is given values."""
    random = np.random.default_rng(11)
    values = arrays(open_orbax(SAMPLES / sample))
    for name, array in values.items():
        if name.endswith("_lora_b"):
            assert not array.any()
            values[name] = random.normal(0, 0.1, array.shape).astype(array.dtype)
    return values


def factors_of(values: dict[str, Array]) -> dict[str, Array]:
    factors = {name: array for name, array in values.items() if "_lora_" in name}
    assert len(factors) == 24
    return factors


def test_full_tree(plain: Path) -> None:
    tree = arrays(open_orbax(SAMPLES / "full_base"))
    found = read_hf(plain)
    assert len(found) == 28
    for i in range(2):
        q = tree[f"layers.{i}.attn.q_einsum.w"]
        expected = np.ascontiguousarray(q.transpose(0, 2, 1)).reshape(64, 32)
        assert found[f"model.layers.{i}.self_attn.q_proj.weight"].tobytes() == expected.tobytes()
        o = tree[f"layers.{i}.attn.attn_vec_einsum.w"]
        expected = np.ascontiguousarray(o.reshape(64, 32).T)
        assert found[f"model.layers.{i}.self_attn.o_proj.weight"].tobytes() == expected.tobytes()
    embedding = tree["embedder.input_embedding"]
    assert found["model.embed_tokens.weight"].tobytes() == embedding.tobytes()


@pytest.mark.parametrize("sample", ["lora_only", "qlora_lora_only"])
def test_factors_onto_the_base(tmp_path: Path, plain: Path, sample: str) -> None:
    factors = factors_of(trained(sample))
    write_run(tmp_path / "run", factors)
    found = convert(tmp_path, tmp_path / "run", plain, "--alpha", ALPHA)
    assert_same_bits(found, rounded(lora_oracle.merged(read_hf(plain), "model.", factors, ALPHA)))


def test_full_tree_with_factors_from_itself(tmp_path: Path, plain: Path) -> None:
    tree = trained("full_with_lora")
    write_run(tmp_path / "run", tree)
    write_base(tmp_path / "config", CONFIG, {})
    found = convert(tmp_path, tmp_path / "run", tmp_path / "config", "--alpha", ALPHA)
    base: dict[str, Array] = read_hf(plain)
    for name, array in tree.items():
        module = name.split(".", 2)[-1]
        for hf_module, share in lora_oracle.HF_MODULES.get(module, {}).items():
            base[f"model.layers.{name.split('.')[1]}.{hf_module}.weight"] = share(array)
    expected = rounded(lora_oracle.merged(base, "model.", factors_of(tree), ALPHA))
    assert found.keys() == expected.keys()
    for name in lora_oracle.deltas(factors_of(tree), ALPHA):
        assert np.array_equal(found[f"model.{name}"], expected[f"model.{name}"]), name


@pytest.mark.parametrize("sample", ["lora_only", "full_with_lora", "qlora_lora_only"])
def test_a_run_that_took_no_step_is_refused(
    tmp_path: Path, plain: Path, sample: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["orbax-to-hf", SAMPLES / sample, "--base", plain, "--out", tmp_path / "out"]
    assert run_cli(*words, "--alpha", ALPHA) == 1
    assert "_lora_b is all zero: the pair changes nothing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sample", ["lora_only", "full_with_lora", "qlora_lora_only"])
def test_their_alpha_is_asked_for(
    tmp_path: Path, plain: Path, sample: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["orbax-to-hf", SAMPLES / sample, "--base", plain, "--out", tmp_path / "out"]
    assert run_cli(*words) == 1
    assert "alpha is not stored in the checkpoint, and it cannot be guessed" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
