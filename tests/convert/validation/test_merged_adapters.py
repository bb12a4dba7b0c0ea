"""Validation of merges of adapters of every kind: PEFT's, several with weights, DoRA, experts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import LAYOUTS
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.validation.merged import planned, validate_merged
from gemma_convert.convert.validation.result import Result
from gemma_convert.surgery.adapters.open import adapter_source
from tests import peft_oracle, tiny
from tests.checkpoints import (
    BF16,
    F32,
    GEMMA3,
    arrays,
    base_arrays,
    factor_arrays,
    memory,
    run_cli,
    write_base,
    write_run,
)
from tests.peft_files import factors, in_memory, write

GEMMA2 = {**GEMMA3, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
"""MaxText keeps its queries multiplied by a scale, so deltas are multiplied too."""

Q, K, UP = (
    "model.layers.1.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    "model.layers.0.mlp.up_proj",
)
SIZES = {Q: (10, 42), K: (10, 21), UP: (10, 11)}
DTYPES = (BF16, np.dtype(np.float16), F32)

# Name to rank, modules, what adapter_config.json says, and alpha over what the factors are scaled
# by: math is plain LoRA of rank 2, style rsLoRA of rank 3; they share one module.
RUNS: dict[str, tuple[int, tuple[str, ...], dict[str, Any], float]] = {
    "math": (2, (Q, UP), {"r": 2, "lora_alpha": 3}, 3 / 2),
    "style": (3, (Q, K), {"r": 3, "lora_alpha": 7, "use_rslora": True}, 7 / np.sqrt(3)),
}
WEIGHTS = (0.75, -0.5)


def values_of(run: str) -> dict[str, Array]:
    """The factors of a run, by PEFT's names."""
    rank, modules, _, _ = RUNS[run]
    seed = len(run)
    found = (factors(path, *SIZES[path], rank=rank, seed=seed).items() for path in modules)
    return {name: array for pairs in found for name, array in pairs}


def delta_of(run: str, path: str) -> Array:
    """B.A times the run's scale, float64; zero for a module that it does not change."""
    _, modules, _, scale = RUNS[run]
    if path not in modules:
        return np.zeros(SIZES[path][::-1])
    a, b = (values_of(run)[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
    return scale * (b.astype(np.float64) @ a.astype(np.float64))


def merged_by_hand(base: dict[str, Array], weights: Sequence[float]) -> dict[str, Array]:
    """Summed in float64 and rounded once."""
    out = dict(base)
    for path in SIZES:
        name = f"{path}.weight"
        total = base[name].astype(np.float64)
        for run, weight in zip(RUNS, weights, strict=True):
            total = total + weight * delta_of(run, path)
        out[name] = total.astype(base[name].dtype)
    return out


def validated(
    out: dict[str, Array], base: dict[str, Array], weights: Sequence[float] = WEIGHTS
) -> Result:
    adapters = [
        adapter_source(in_memory(values_of(run), **config).replace(source=run), weight)
        for (run, (_, _, config, _)), weight in zip(RUNS.items(), weights, strict=True)
    ]
    written = memory(out, config=GEMMA3, source="out")
    job = planned(written, memory(base, config=GEMMA3, source="base"), None, adapters=adapters)
    return validate_merged(written, job, every=True)


def said(result: Result) -> dict[str, str]:
    return {finding.where.removesuffix(".weight"): finding.what for finding in result.findings}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [(1.0, 1.0), WEIGHTS])
def test_two_of_unequal_ranks_by_weight(dtype: Any, weights: tuple[float, float]) -> None:
    base = base_arrays(GEMMA3, "model.", dtype)
    result = validated(merged_by_hand(base, weights), base, weights)
    assert result.passed, result.findings
    checked = {name: row["checked"] for name, row in result.data["tensors"].items()}
    assert checked == {f"{path}.weight": base[f"{path}.weight"].size for path in SIZES}
    assert [row["weight"] for row in result.data["adapters"]] == list(weights)


WRONG: dict[str, tuple[tuple[float, float], dict[str, str]]] = {
    "weights exchanged": (
        WEIGHTS[::-1],
        {
            Q: "what was added is -0.667 times what math adds with weight 0.75 and -1.5 times what "
            "style adds with weight -0.5",
            K: "what was added is -1.5 times what the adapter adds",
            UP: "what was added is -0.6667 times what the adapter adds",
        },
    ),
    "weights left out": (
        (1.0, 1.0),
        {
            Q: "1.33 times what math adds with weight 0.75 and -2 times what style adds",
            K: "what was added is -2 times what the adapter adds: its weight was left out",
            UP: "what was added is 1.333 times what the adapter adds: its weight was left out",
        },
    ),
    "rsLoRA scaled as LoRA": (
        (0.75, -0.5 / np.sqrt(3)),
        {
            Q: "1 times what math adds with weight 0.75 and 0.577 times what style adds",
            K: "what was added is 0.5774 times what the adapter adds",
        },
    ),
    "one of two not applied": (
        (0.75, 0.0),
        {
            Q: "1 times what math adds with weight 0.75 and",
            K: "the adapter was not applied",
        },
    ),
    "none applied": (
        (0.0, 0.0),
        {
            Q: "none was applied",
            K: "the adapter was not applied",
            UP: "the adapter was not applied",
        },
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_weight_is_named(wrong: str) -> None:
    weights, told = WRONG[wrong]
    base = base_arrays(GEMMA3, "model.", F32)
    found = said(validated(merged_by_hand(base, weights), base))
    assert found.keys() == told.keys()
    for path, cause in told.items():
        assert cause in found[path]


def test_the_sum_must_be_rounded_once() -> None:
    """F16: each adapter merged and rounded to bfloat16 for itself."""
    base = base_arrays(GEMMA3, "model.", BF16)
    after = merged_by_hand(merged_by_hand(base, (WEIGHTS[0], 0.0)), (0.0, WEIGHTS[1]))
    assert said(validated(after, base)).keys() == {Q}  # the one that both change


MAGNITUDE = f"base_model.model.{Q}.lora_magnitude_vector"


def dora() -> tuple[dict[str, Array], Any]:
    """Base and an adapter whose magnitudes are not the norms of the base."""
    base = base_arrays(GEMMA3, "model.", F32)
    values = factors(Q, *SIZES[Q], rank=3, seed=3)
    norms = np.linalg.norm(base[f"{Q}.weight"], axis=1)
    values[MAGNITUDE] = (norms * np.linspace(0.6, 1.7, 42)).astype(F32)
    return base, in_memory(values, r=3, lora_alpha=7, use_dora=True)


def dora_by_hand(base: Array, adapter: Any, weight: float, axis: int = 1) -> Array:
    """W + weight (m (W + D) / |W + D| - W), float64, the norm along ``axis``."""
    a, b = (adapter[f"base_model.model.{Q}.lora_{side}.weight"].numpy() for side in "AB")
    wide = base.astype(np.float64)
    total = wide + 7 / 3 * (b.astype(np.float64) @ a.astype(np.float64))
    ratio = adapter[MAGNITUDE].numpy().astype(np.float64)[:, None]
    scaled = ratio * total / np.linalg.norm(total, axis=axis, keepdims=True)
    combined: Array = wide + weight * (scaled - wide)
    return combined


def validated_dora(out: Array, base: dict[str, Array], adapter: Any, weight: float) -> Result:
    written = memory({**base, f"{Q}.weight": out}, config=GEMMA3, source="out")
    source = memory(base, config=GEMMA3, source="base")
    job = planned(written, source, None, adapters=[adapter_source(adapter, weight)])
    return validate_merged(written, job, every=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_dora(dtype: Any, weight: float) -> None:
    base, adapter = dora()
    base = {name: array.astype(dtype) for name, array in base.items()}
    exact = dora_by_hand(base[f"{Q}.weight"], adapter, weight)
    result = validated_dora(exact.astype(dtype), base, adapter, weight)
    assert result.passed, result.findings
    source = memory(base, config=GEMMA3, source="base")
    ours = convert(source, LAYOUTS["hf"], adapters=[adapter_source(adapter, weight)])
    found = ours.plan.target[f"{Q}.weight"].numpy()
    assert validated_dora(found, base, adapter, weight).passed


def test_a_wrong_dora_is_named() -> None:
    base, adapter = dora()
    weight = base[f"{Q}.weight"]
    exact = dora_by_hand(weight, adapter, 1.0)
    for wrong in (
        dora_by_hand(weight, adapter, 1.0, axis=0),
        exact / adapter[MAGNITUDE].numpy()[:, None],
        exact * (1 + 1e-5),  # some eighty units in the last place of float32
    ):
        result = validated_dora(wrong.astype(F32), base, adapter, 1.0)
        assert said(result).keys() == {Q}


@pytest.mark.parametrize("config", [GEMMA3, GEMMA2], ids=["gemma3", "gemma2"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "hf"])
def test_into_every_layout(layout: str, config: dict[str, Any]) -> None:
    """PEFT's and Qwix' factors of the same modules; a layer's share exchanged is found."""
    base = memory(base_arrays(config, "model."), config=config, source="base")
    values = {name: array for run in RUNS for name, array in values_of(run).items()}
    peft = {n: a for n, a in values.items() if K not in n and Q not in n}
    adapters = [
        adapter_source(in_memory(peft), 0.5),
        adapter_source(memory(factor_arrays(config), source="run"), 2.0),
    ]
    options: dict[str, Any] = {"alpha": 5.0, "adapters": adapters}
    job = convert(base, LAYOUTS[layout], computed_dtype=F32, **options)
    made = arrays(job.plan.target)
    name = next(n for n in made if "gat" in n or "wi_0" in n)

    def check(written: dict[str, Array]) -> Result:
        out = memory(written, source="out")
        return validate_merged(out, planned(out, base, None, **options), every=True)

    result = check(made)
    assert result.passed, result.findings
    assert name in result.data["tensors"]
    wrong = check({**made, name: np.ascontiguousarray(made[name][..., ::-1])})
    assert [finding.where for finding in wrong.findings] == [name]


@pytest.mark.parametrize("layout", ["tunix", "deepmind", "maxtext"])
def test_an_orbax_output_on_the_disk(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names as its tree has them, and the ledger at its root."""
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    given = ["--adapter", tmp_path / "run", "--alpha", 5]
    words = ["convert", tmp_path / "base", "--to", layout, "--out", tmp_path / "out", *given]
    assert run_cli(*words, "--quiet") == 0
    capsys.readouterr()
    check = ["validate", "merged", tmp_path / "out", "--base", tmp_path / "base", *given, "--json"]
    assert run_cli(*check) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["tensors"]) > 6
    assert told["notes"] == []  # the ledger was found
    assert run_cli(*check[:-2], 4, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert [f["where"] for f in told["findings"] if f["where"] == "conversion.json"]
    # 5 / 4, but for the rounding to bfloat16
    assert re.search(r"what was added is 1\.2[45]\d? times", told["findings"][0]["what"])


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts and router": (
        "gemma4-moe",
        {
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            "target_modules": ["q_proj", "router.proj"],
        },
    ),
    "embedding, head and saved modules": (
        "gemma3",
        {
            "use_dora": True,
            "target_modules": ["v_proj", "lm_head"],
            "modules_to_save": ["embed_tokens", "input_layernorm"],
        },
    ),
}


@pytest.fixture(params=CASES)
def by_peft(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Base and adapter as transformers and PEFT save them, and our merge of them."""
    case, config = CASES[request.param]
    model = tiny.hf_model(case)
    model.save_pretrained(tmp_path / "base")
    adapted = peft_oracle.peft_model(model, r=3, lora_alpha=7, **config)
    peft_oracle.save(adapted, tmp_path / "adapter")
    words = ["surgery", "merge-lora", tmp_path / "base", tmp_path / "adapter"]
    assert run_cli(*words, "--weight", 1, "--out", tmp_path / "out", "--quiet") == 0
    return tmp_path


def test_what_peft_saves(by_peft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["validate", "merged", by_peft / "out", "--base", by_peft / "base", "--all"]
    assert run_cli(*words, "--adapter", by_peft / "adapter") == 0
    assert "PASSED" in capsys.readouterr().out


@pytest.fixture
def two_runs(tmp_path: Path) -> list[Any]:
    """A base and two PEFT adapters on the disk, merged by the command; the words that check it."""
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    given: list[Any] = []
    for (run, (_, _, config, _)), weight in zip(RUNS.items(), WEIGHTS, strict=True):
        write(tmp_path / run, values_of(run), **config)
        given += ["--weight", weight]
    runs = [tmp_path / run for run in RUNS]
    words = ["surgery", "merge-lora", tmp_path / "base", *runs, *given]
    assert run_cli(*words, "--out", tmp_path / "out", "--quiet") == 0
    named = [word for run in runs for word in ("--adapter", run)]
    return ["validate", "merged", tmp_path / "out", "--base", tmp_path / "base", *named, *given]


def test_the_command_with_two(
    two_runs: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(*two_runs, "--all") == 0
    capsys.readouterr()
    assert run_cli(*two_runs[:-4]) == 1  # without the weights
    told = " ".join(capsys.readouterr().out.split())
    assert "conversion.json: adapters[0].weight is 0.75, expected 1.0" in told
    assert "conversion.json: adapters[1].weight is -0.5, expected 1.0" in told
    assert run_cli(*two_runs[:5], *two_runs[5:7]) == 1  # one of them
    told = " ".join(capsys.readouterr().out.split())
    assert "conversion.json: tells of 2 adapters, 1 are given" in told


def test_bad_usage(two_runs: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_cli("validate", "merged", tmp_path / "out", *two_runs[5:]) == 2
    assert "Missing option '--base' or '--source'" in capsys.readouterr().err
    assert run_cli(*two_runs, "--weight", 3) == 2
    assert "2 adapters, but 3 times --weight" in capsys.readouterr().err


def test_a_checkpoint_with_factors_beside_an_adapter(tmp_path: Path) -> None:
    """``--source``: what was converted, its own factors merged with those of PEFT."""
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    write(tmp_path / "math", values_of("math"), **RUNS["math"][2])
    given = ["--base", tmp_path / "base", "--adapter", tmp_path / "math", "--alpha", 5]
    words = ["orbax-to-hf", tmp_path / "run", *given, "--out", tmp_path / "out", "--quiet"]
    assert run_cli(*words) == 0
    check = ["validate", "merged", tmp_path / "out", *given]
    assert run_cli(*check, "--source", tmp_path / "run") == 0
    assert run_cli(*check, "--adapter", tmp_path / "run") == 1  # the ledger has another order
