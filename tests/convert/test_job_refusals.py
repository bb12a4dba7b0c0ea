"""Jobs that must be refused, since they would end well with a wrong result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.cli import main
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError, ConfigError, LayoutError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.random_model import random_factors, random_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import ArrayTensor

F32 = np.dtype(np.float32)
CONFIG: dict[str, Any] = {
    "model_type": "gemma3",
    "vision_config": {"hidden_size": 6},
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 23,
        "hidden_size": 10,
        "intermediate_size": 11,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 7,
    },
}
TOWER = "vision_tower.vision_model.w"


def base(**more: np.ndarray[Any, Any]) -> Checkpoint:
    text = random_model(CONFIG, Spelling(HF, "language_model.model."), F32)
    extra = {name.replace("__", "."): ArrayTensor(array) for name, array in more.items()}
    return text.replace(tensors={**text.tensors, **extra}, source="base", format="safetensors")


def tree() -> Checkpoint:
    weights = random_model(CONFIG, Spelling(TUNIX, ""), F32, seed=1)
    return weights.replace(config={}, source="run", format="orbax")


def tower(dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {TOWER.replace(".", "__"): np.ones((3, 2)).astype(dtype)}


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.float8_e4m3fn])
def test_quantised_towers_are_refused_whoever_gives_the_text(dtype: Any) -> None:
    with pytest.raises(LayoutError, match=rf"base: {TOWER} is .*: a quantised weight"):
        convert(tree(), HF, base=base(**tower(dtype)))


def test_wide_integers_in_a_tower_are_copied() -> None:
    job = convert(tree(), HF, base=base(**tower(np.int64)))
    assert job.plan.target[TOWER].dtype == np.int64


def test_a_projector_is_not_the_tower_that_config_json_announces() -> None:
    projector = {"multi_modal_projector__w": np.ones((2, 3), F32)}
    with pytest.raises(ConfigError, match=r"vision_config, but no such weights are there"):
        convert(tree(), HF, base=base(**projector))


def test_a_named_model_that_contradicts_the_config() -> None:
    with pytest.raises(ConfigError, match=r"config\.json is not that of gemma-4-31b"):
        convert(base(), TUNIX, model="gemma-4-31b")


def test_towers_left_out_have_their_own_reason() -> None:
    model = read_model(CONFIG, families())
    factors = random_factors(model, Spelling(TUNIX, ""), 2, F32).replace(source="run")
    job = convert(factors, TUNIX, base=base(**tower(F32)), alpha=4.0)
    assert job.plan.dropped == {
        TOWER: "not part of the text model, nor of a tower known here that config.json describes"
    }


@pytest.mark.parametrize("rank", [2, 2.0, "2"])
def test_a_stored_rank_that_is_right(rank: Any) -> None:
    model = read_model(CONFIG, families())
    factors = random_factors(model, Spelling(TUNIX, ""), 2, F32)
    run = factors.replace(source="run", metadata={"custom_metadata": {"rank": rank}})
    assert convert(run, HF, base=base(**tower(F32)), alpha=4.0).adapters


@pytest.mark.parametrize("stored", [{"lora": {"r": 16}}, {"lora_rank": 16}, {"rank": "16"}])
def test_a_stored_rank_in_any_spelling(stored: dict[str, Any]) -> None:
    model = read_model(CONFIG, families())
    factors = random_factors(model, Spelling(TUNIX, ""), 2, F32)
    run = factors.replace(source="run", metadata={"custom_metadata": stored})
    with pytest.raises(AdapterError, match="have rank 2, the checkpoint's metadata says 16"):
        convert(run, HF, base=base(**tower(F32)), alpha=4.0)


def test_a_link_to_an_orbax_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--force`` onto the folder that holds the step by way of a link."""
    assert main(["demo", "--out", str(tmp_path / "d")]) == 0
    part = tmp_path / "d" / "run" / "0"
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    part.rename(blobs / "part")
    part.symlink_to(blobs / "part")
    words = ["orbax-to-hf", str(tmp_path / "d" / "run"), "--base", str(tmp_path / "d" / "base")]
    assert main([*words, "--alpha", "6", "--force", "--out", str(blobs)]) == 1
    assert "are the same directory or one holds the other" in capsys.readouterr().err
    assert (blobs / "part" / "model_params" / "manifest.ocdbt").exists()


def test_an_output_that_is_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "d")]) == 0
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    words = ["orbax-to-hf", str(tmp_path / "d" / "run"), "--base", str(tmp_path / "d" / "base")]
    words += ["--alpha", "6", "--out", str(link)]
    assert main(words) == 1
    assert "exists and is a link" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert (link / "config.json").is_file()
    assert not link.is_symlink()
