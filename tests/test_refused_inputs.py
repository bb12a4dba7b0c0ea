"""Inputs that look right and are not: quantised, incomplete, hostile, of a doubtful alpha."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array
from tests.checkpoints import (
    BF16,
    GEMMA3,
    GEMMA4,
    RANK,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    snapshot,
    tunix_arrays,
    write_base,
    write_run,
)

UP = "layers.1.mlp.up_proj.weight"
CODES = [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
TOWER = "model.vision_tower.embeddings"


def merge(directory: Path, *options: Any) -> int:
    words = ["orbax-to-hf", directory / "run", "--base", directory / "base"]
    return run_cli(*words, "--out", directory / "out", *options)


def refused(directory: Path, message: str, capsys: Any, *options: Any) -> None:
    before = snapshot(directory)
    assert merge(directory, *options) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", captured.err), captured.err
    assert captured.out == ""
    assert snapshot(directory) == before


def write_plain(directory: Path, config: Any, weights: dict[str, Array]) -> None:
    """A base whose file is put together here: the library does not save every dtype."""
    write_base(directory, config, {})
    kinds = {"int8": "I8", "int64": "I64", "bfloat16": "BF16"}
    kinds |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    header: dict[str, Any] = {}
    data = b""
    for name, array in sorted(weights.items(), key=lambda item: -item[1].dtype.itemsize):
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {
            "dtype": kinds[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": offsets,
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = directory / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_a_quantised_weight(tmp_path: Path, dtype: np.dtype[Any], capsys: Any) -> None:
    weights = base_arrays(GEMMA3, "model.")
    weights[f"model.{UP}"] = np.ones_like(weights[f"model.{UP}"]).astype(dtype)
    write_plain(tmp_path / "base", GEMMA3, weights)
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    message = (
        f"base: model.{UP} is {dtype}: a quantised weight; give the checkpoint before its quant"
    )
    refused(tmp_path, message, capsys, "--alpha", 5)
    words = ["hf-to-orbax", tmp_path / "base", "--layout", "tunix", "--out", tmp_path / "out"]
    assert run_cli(*words) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", CODES[1:], ids=str)
def test_a_quantised_weight_in_a_tower(tmp_path: Path, dtype: np.dtype[Any], capsys: Any) -> None:
    weights = base_arrays(GEMMA4, "model.language_model.")
    weights[f"{TOWER}.weight"] = np.ones((3, 5), dtype)
    write_plain(tmp_path / "base", GEMMA4, weights)
    write_run(tmp_path / "run", factor_arrays(GEMMA4))
    message = f"base: {TOWER}.weight is {dtype}: a quantised weight"
    refused(tmp_path, message, capsys, "--alpha", 5)


def test_integers_in_a_tower_are_copied(tmp_path: Path) -> None:
    weights = base_arrays(GEMMA4, "model.language_model.")
    weights[f"{TOWER}.weight"] = np.full((3, 5), 0.25, BF16)
    weights[f"{TOWER}.position_ids"] = np.arange(7)
    write_base(tmp_path / "base", GEMMA4, weights)
    write_run(tmp_path / "run", factor_arrays(GEMMA4))
    assert merge(tmp_path, "--alpha", 5, "--dtype", "float32", "--quiet") == 0
    found = read_hf(tmp_path / "out")[f"{TOWER}.position_ids"]
    assert found.dtype == np.int64
    assert found.tolist() == list(range(7))


@pytest.mark.parametrize("kind", ["vision_config", "audio_config"])
def test_a_tower_that_is_announced_and_not_there(tmp_path: Path, kind: str, capsys: Any) -> None:
    """A full checkpoint and a base without weights: nothing has the tower's weights."""
    config = {**GEMMA4, kind: {"hidden_size": 3}}
    write_base(tmp_path / "base", config, {})
    write_run(tmp_path / "run", tunix_arrays(GEMMA4))
    message = (
        f"base: config.json has {kind}, but no such weights are there: the output would load with "
        "random ones; give a base with its weights, or a text-only config.json"
    )
    refused(tmp_path, message, capsys)


def test_a_tower_that_is_null_or_there(tmp_path: Path) -> None:
    """No weights are missing where the config announces none, or the base has them."""
    write_base(tmp_path / "base", {**GEMMA4, "vision_config": None}, {})
    write_run(tmp_path / "run", tunix_arrays(GEMMA4))
    assert merge(tmp_path, "--quiet") == 0
    weights = base_arrays(GEMMA4, "model.language_model.")
    weights[f"{TOWER}.weight"] = np.full((3, 5), 0.25, BF16)
    config = {**GEMMA4, "vision_config": {"hidden_size": 3}}
    write_base(tmp_path / "whole" / "base", config, weights)
    write_run(tmp_path / "whole" / "run", tunix_arrays(GEMMA4))
    assert merge(tmp_path / "whole", "--quiet") == 0
    assert f"{TOWER}.weight" in read_hf(tmp_path / "whole" / "out")


def test_an_untied_config_without_a_head(tmp_path: Path, capsys: Any) -> None:
    weights = base_arrays(GEMMA3, "model.")
    write_base(tmp_path / "base", {**GEMMA3, "tie_word_embeddings": False}, weights)
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    message = (
        "base: config.json: tie_word_embeddings is false, but there is no lm_head.weight; set it "
        "to true if the model's head is its embedding"
    )
    refused(tmp_path, message, capsys, "--alpha", 5)


def test_an_untied_config_and_a_full_checkpoint(tmp_path: Path, capsys: Any) -> None:
    write_base(tmp_path / "base", {**GEMMA3, "tie_word_embeddings": False}, {})
    write_run(tmp_path / "run", tunix_arrays(GEMMA3))
    message = "config.json: tie_word_embeddings is false, but Tunix's models have no head"
    refused(tmp_path, message, capsys)


@pytest.mark.parametrize("layers", [10_001, 10**9])
def test_a_config_of_too_many_layers(layers: int) -> None:
    """At once: the layers must not be made first, a billion would not fit into memory."""
    config = {key: value for key, value in GEMMA3.items() if key != "layer_types"}
    start = time.monotonic()
    message = f"^config.json: num_hidden_layers is {layers}, more than 10000"
    with pytest.raises(ConfigError, match=message):
        read_model({**config, "num_hidden_layers": layers}, families())
    assert time.monotonic() - start < 1


DOUBTFUL: dict[str, tuple[Any, str]] = {
    "rslora": (
        {"lora": {"alpha": 5, "use_rslora": True}},
        r"metadata says use_rslora: its scale is alpha / sqrt\(r\), which Qwix",
    ),
    "rslora outside": (
        {"lora_alpha": 5, "use_rslora": True},
        r"metadata says use_rslora: its scale is alpha / sqrt\(r\), which Qwix",
    ),
    "two alphas": (
        {"lora": {"alpha": 16}, "lora_alpha": 8},
        "metadata says alpha 16 and 8; save one of them",
    ),
    "two alphas outside": (
        {"lora_alpha": 16, "alpha": 0.5},
        "metadata says alpha 16 and 0.5; save one of them",
    ),
    "a string": (
        {"lora": {"alpha": "16"}},
        "metadata says alpha '16', which is not a number; save it as a number",
    ),
    "a bool": (
        {"alpha": True},
        "metadata says alpha True, which is not a number; save it as a number",
    ),
    "another rank": (
        {"lora": {"alpha": 5, "rank": RANK + 1}},
        "layers.*: the factors have rank 2, the checkpoint's metadata says 3; factors and metadata",
    ),
}


@pytest.mark.parametrize("case", DOUBTFUL)
@pytest.mark.parametrize("given", [[], ["--alpha", 16]])
def test_doubtful_metadata(tmp_path: Path, case: str, given: list[Any], capsys: Any) -> None:
    """Refused, whether or not --alpha repeats one of the numbers."""
    metadata, message = DOUBTFUL[case]
    if given and case == "another rank":
        given = ["--alpha", 5]
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    write_run(tmp_path / "run", factor_arrays(GEMMA3), metadata)
    refused(tmp_path, message, capsys, *given)


@pytest.mark.parametrize("case", DOUBTFUL)
def test_inspect_tells_doubtful_metadata(tmp_path: Path, case: str, capsys: Any) -> None:
    metadata, message = DOUBTFUL[case]
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3), metadata)
    assert run_cli("inspect", run) == 0
    assert "metadata says" in capsys.readouterr().out
    assert run_cli("inspect", run, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert any(re.search(message, text) for text in report["disagreements"])
    assert report["adapter"]["alpha"] == (5 if case == "another rank" else None)
    assert report["adapter"]["pairs"] == len(factor_arrays(GEMMA3)) // 2


@pytest.mark.parametrize(
    ("metadata", "options"), [(None, ["--alpha", "-5"]), ({"lora": {"alpha": -5}}, [])]
)
def test_a_negative_alpha(tmp_path: Path, metadata: Any, options: list[str], capsys: Any) -> None:
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    write_run(tmp_path / "run", factor_arrays(GEMMA3), metadata)
    refused(tmp_path, "alpha is -5; pass a finite value above 0", capsys, *options)


def test_metadata_that_agrees(tmp_path: Path, capsys: Any) -> None:
    """The same alpha twice, and the rank that the factors have, are no reason to refuse."""
    metadata = {"lora": {"alpha": 5, "rank": RANK}, "lora_alpha": 5.0}
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3), metadata)
    assert merge(tmp_path, "--quiet") == 0
    assert run_cli("inspect", run, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["disagreements"], report["adapter"]["alpha"]) == ([], 5)
