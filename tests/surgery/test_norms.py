"""What `inspect` tells of adapters: scales, modules, norms without the product of the factors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.inspect import inspect
from gemma_convert.convert.layouts import TUNIX
from gemma_convert.convert.model import read_model
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.convert.registry import families
from gemma_convert.surgery.adapters.adapter import uniform
from gemma_convert.surgery.adapters.norms import product_norm
from gemma_convert.surgery.adapters.place import place
from gemma_convert.surgery.adapters.qwix import split_factors
from gemma_convert.surgery.delta import LowRank
from tests import lora_oracle
from tests.checkpoints import (
    CONFIGS,
    F32,
    GEMMA3,
    NATIVE,
    base_arrays,
    factor_arrays,
    memory,
    run_cli,
    write_base,
    write_run,
)
from tests.peft_files import factors, write


@pytest.mark.parametrize("family", CONFIGS)
def test_the_norm_of_a_product_is_that_of_its_factors(family: str) -> None:
    _, pairs = split_factors(memory(factor_arrays(CONFIGS[family], F32)))
    placed = place(uniform(pairs, 4.0, NATIVE, "run"), read_model(CONFIGS[family], families()))
    assert placed.keys() == pairs.keys()
    for pair in placed.values():
        product = LowRank(pair.parameter, TUNIX, pair.pair, 1.0).numpy().astype(np.float64)
        expected = float(np.linalg.norm(product))
        # the product is rounded to float32, its norm is not
        assert product_norm(pair, TUNIX) == pytest.approx(expected, rel=1e-6)


def test_relative_norms(tmp_path: Path) -> None:
    base = base_arrays(GEMMA3, "model.", F32)
    write_base(tmp_path / "base", GEMMA3, base)
    run = factor_arrays(GEMMA3, F32)
    write_run(tmp_path / "run", run, {"lora": {"alpha": 5}})
    report = inspect(open_checkpoint(tmp_path / "run"), open_base(tmp_path / "base"))
    found = report["adapter"]["relative_norm_by_module"]
    added = lora_oracle.deltas(run, 5.0)
    assert len(found) == 12
    for module, parts in (
        ("mlp.up_proj.kernel", ["mlp.up_proj"]),
        ("attn.kv_einsum.w", ["self_attn.k_proj", "self_attn.v_proj"]),
    ):
        names = [f"layers.1.{part}.weight" for part in parts]
        delta = np.linalg.norm([np.linalg.norm(added[name]) for name in names])
        weight = np.linalg.norm([np.linalg.norm(base[f"model.{name}"]) for name in names])
        assert found[f"layers.1.{module}"] == pytest.approx(delta / weight, rel=1e-6)


def test_inspect_tells_the_scale_applied(tmp_path: Path, capsys: Any) -> None:
    values = factors("model.layers.0.self_attn.q_proj", 10, 42)
    values |= factors("model.layers.1.mlp.up_proj", 10, 11, rank=4)
    config = {"use_rslora": True, "rank_pattern": {"up_proj": 4}, "alpha_pattern": {"up_proj": 3}}
    write(tmp_path / "adapter", values, **config)
    assert run_cli("inspect", tmp_path / "adapter", "--json") == 0
    adapter = json.loads(capsys.readouterr().out)["adapter"]
    assert adapter["scale_by_module"] == {
        "layers.0.self_attn.q_proj.weight": pytest.approx(5 / 2**0.5),
        "layers.1.mlp.up_proj.weight": 1.5,
    }
    assert adapter["modules"] == {"self_attn.q_proj": 1, "mlp.up_proj": 1}
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    assert run_cli("inspect", tmp_path / "adapter", "--base", tmp_path / "base") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "A.B is multiplied by 1.5, 3.53553" in text
    assert "largest delta" in text


def test_an_adapter_that_is_not_understood_is_told_as_a_disagreement(tmp_path: Path) -> None:
    values = factors("model.layers.0.self_attn.q_proj", 10, 42)
    write(tmp_path / "adapter", values, use_qalora=True)
    report = inspect(open_checkpoint(tmp_path / "adapter"))
    assert report["adapter"]["kind"] == "PEFT LORA"
    assert any("use_qalora = True: inputs are pooled" in text for text in report["disagreements"])


def test_alpha_may_be_given(tmp_path: Path) -> None:
    run = open_checkpoint(write_run(tmp_path / "run", factor_arrays(GEMMA3)))
    assert "scales" not in inspect(run)["adapter"]
    assert inspect(run, alpha=6)["adapter"]["scales"] == [3.0]
