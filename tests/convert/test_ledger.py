"""conversion.json against numbers computed here with numpy and hashlib."""

from __future__ import annotations

import hashlib
import json
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.tensor import Array
from tests import lora_oracle
from tests.checkpoints import (
    ALPHA,
    F32,
    GEMMA3,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    write_base,
    write_run,
)


def convert(
    tmp_path: Path,
    base: dict[str, Array],
    run: dict[str, Array],
    *options: str,
    **files: Any,
) -> dict[str, Any]:
    write_base(tmp_path / "base", GEMMA3, base, **files)
    write_run(tmp_path / "run", run)
    words = ["orbax-to-hf", tmp_path / "run", "--base", tmp_path / "base"]
    words += ["--out", tmp_path / "out", "--alpha", f"{ALPHA:g}", "--quiet", *options]
    assert run_cli(*words) == 0
    ledger: dict[str, Any] = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert shlex.split(ledger["command"]) == ["gemma-convert", *map(str, words)]
    return ledger


def loss(base: Array, merged: Array, delta: Array) -> tuple[float, float, int]:
    """Squares of the error of the realised delta and of the delta, and weights changed."""
    realised = merged.astype(np.float64) - base.astype(np.float64)
    return float(((realised - delta) ** 2).sum()), float((delta**2).sum()), (realised != 0).sum()


def test_counts_pairs_and_survival(tmp_path: Path) -> None:
    base, factors = base_arrays(GEMMA3, "model."), factor_arrays(GEMMA3)
    base["lm_head.weight"] = base["model.embed_tokens.weight"]
    ledger = convert(tmp_path, base, factors, shards=3)
    merged = read_hf(tmp_path / "out")
    deltas = lora_oracle.deltas(factors, ALPHA)
    assert len(deltas) == 14
    assert ledger["counts"] == {
        "copied": len(base) - 1 - len(deltas),
        "merged": len(deltas),
        "dropped": 1,
    }
    assert ledger["dropped"] == {"lm_head.weight": "tied to the embedding: written once"}
    assert ledger["bytes"] == sum(array.nbytes for array in merged.values())
    assert ledger["model"] == {"family": "gemma3", "name": None, "layers": 2}
    (adapter,) = ledger["adapters"]
    assert (adapter["scales"], adapter["ranks"]) == ([ALPHA / 2], [2])
    pairs = len(factors) // 2
    assert [adapter[f"pairs_{x}"] for x in ("found", "applied", "changed")] == [pairs] * 3

    by_name = {
        f"model.{name}": loss(base[f"model.{name}"], merged[f"model.{name}"], delta)
        for name, delta in deltas.items()
    }
    assert ledger["survival_by_tensor"].keys() == by_name.keys()
    for name, (error, size, changed) in by_name.items():
        found = ledger["survival_by_tensor"][name]
        # The ledger's own sums are of float32 values.
        assert found["relative_error"] == pytest.approx((error / size) ** 0.5, rel=1e-4)
        assert found["weights_changed"] == changed
        assert found["weights"] == base[name].size
    errors, sizes, changes = (sum(column) for column in zip(*by_name.values(), strict=True))
    assert ledger["survival"]["relative_error"] == pytest.approx((errors / sizes) ** 0.5, rel=1e-4)
    assert ledger["survival"]["weights_changed"] == changes
    assert ledger["survival"]["weights"] == sum(delta.size for delta in deltas.values())
    assert 0 < ledger["survival"]["relative_error"] < 0.5


def test_files_and_tensors(tmp_path: Path) -> None:
    base = base_arrays(GEMMA3, "model.")
    files = {"tokenizer.json": "{}", "additional_chat_templates/tool.jinja": "x"}
    ledger = convert(
        tmp_path, base, factor_arrays(GEMMA3), "--max-shard-size", "2KB", shards=2, files=files
    )
    out = tmp_path / "out"
    there = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert ledger["output"]["path"] == str(out)
    assert ledger["output"]["files"].keys() == there - {"conversion.json"}
    assert files.keys() <= there
    for name, stated in ledger["output"]["files"].items():
        data = (out / name).read_bytes()
        assert stated == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    merged = {f"model.{name}" for name in lora_oracle.deltas(factor_arrays(GEMMA3), ALPHA)}
    assert ledger["tensors"] == {
        name: {
            "action": "merged" if name in merged else "copied",
            "dtype": "bfloat16",
            "shape": list(array.shape),
        }
        for name, array in read_hf(out).items()
    }


def test_inputs_and_versions(tmp_path: Path) -> None:
    ledger = convert(tmp_path, base_arrays(GEMMA3, "model."), factor_arrays(GEMMA3))
    run, base = ledger["inputs"]
    assert (run["path"], run["format"]) == (str(tmp_path / "run" / "0" / "model_params"), "orbax")
    assert (base["path"], base["format"]) == (str(tmp_path / "base"), "safetensors")
    data = (tmp_path / "base" / "model.safetensors").read_bytes()
    header = hashlib.sha256(data[: 8 + int.from_bytes(data[:8], "little")]).hexdigest()
    assert base["fingerprint"]["model.safetensors"].startswith(f"sha256:{header} size:{len(data)} ")
    assert ledger["tool"] == f"gemma-convert {version('gemma-convert')}"
    for package in ("numpy", "safetensors", "tensorstore"):
        assert ledger["versions"][package] == version(package)
    assert ledger["seconds"] > 0
    assert ledger["peak_memory_bytes"] > 10**6


def test_factors_digest_tells_adapters_apart(tmp_path: Path) -> None:
    base, factors = base_arrays(GEMMA3, "model."), factor_arrays(GEMMA3)
    digests = []
    for number, values in enumerate((factors, factors, factor_arrays(GEMMA3, seed=2))):
        ledger = convert(tmp_path / str(number), base, values)
        digests.append(ledger["adapters"][0]["factors_sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_a_pair_that_vanishes_in_the_rounding_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The delta of q is below half a unit of the weights, that of v above: kv has changed."""
    base, factors = base_arrays(GEMMA3, "model."), factor_arrays(GEMMA3)
    factors = {name: array for name, array in factors.items() if name.startswith("layers.1.attn.")}
    factors["layers.1.attn.q_einsum.w_lora_b"] *= factors[
        "layers.1.attn.q_einsum.w_lora_b"
    ].dtype.type(1e-9)
    factors["layers.1.attn.kv_einsum.w_lora_b"][:, 0] = 0
    ledger = convert(tmp_path, base, factors, "--allow-unchanged")
    (adapter,) = ledger["adapters"]
    assert [adapter[f"pairs_{x}"] for x in ("found", "applied", "changed")] == [3, 3, 2]
    assert adapter["unchanged"] == ["layers.1.attn.q_einsum.w"]
    lost = ledger["survival_by_tensor"]["model.layers.1.self_attn.q_proj.weight"]
    assert (lost["relative_error"], lost["weights_changed"]) == (1.0, 0)
    assert capsys.readouterr().err == ""
    words = ["orbax-to-hf", tmp_path / "run", "--base", tmp_path / "base"]
    assert run_cli(*words, "--out", tmp_path / "two", "--alpha", "5", "--allow-unchanged") == 0
    assert "warning: 1 pairs change no weight; what vanished in the rounding" in (
        capsys.readouterr().err
    )
    ledger = convert(tmp_path / "wide", base, factors, "--dtype", "float32")
    assert ledger["adapters"][0]["pairs_changed"] == 3
    assert {stated["dtype"] for stated in ledger["tensors"].values()} == {str(F32)}


def test_without_factors_there_is_no_adapter(tmp_path: Path) -> None:
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    words = ["hf-to-orbax", tmp_path / "base", "--layout", "tunix", "--out", tmp_path / "out"]
    assert run_cli(*words, "--quiet") == 0
    ledger = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert "adapters" not in ledger
    assert ledger["counts"] == {"copied": 14, "rearranged": 12, "dropped": 0}
    for name, stated in ledger["output"]["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert stated == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
