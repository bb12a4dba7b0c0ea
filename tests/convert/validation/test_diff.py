"""Diff of checkpoints: names, layouts, order, and the faults that it must name."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import LAYOUTS
from gemma_convert.convert.validation.diff import as_csv, diff
from gemma_convert.convert.validation.place import place
from gemma_convert.convert.validation.result import Result
from tests import lora_oracle
from tests.checkpoints import (
    BF16,
    CONFIGS,
    F32,
    GEMMA3,
    USUAL_PREFIX,
    arrays,
    base_arrays,
    factor_arrays,
    memory,
    run_cli,
    write_base,
    write_run,
)
from tests.planted_faults import CONFIG, FAULTS

HF_NAMES = base_arrays(GEMMA3, "model.")


def tensors(result: Result) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result.data["tensors"]}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_planted_fault_is_named(fault: str, dtype: np.dtype[np.generic]) -> None:
    right = base_arrays(CONFIG, "model.", dtype)
    planted = FAULTS[fault]
    result = diff(memory(right), memory(planted.spoil(right)))
    said = {finding.where: finding.what for finding in result.findings}
    assert set(planted.names) <= said.keys()
    assert planted.told in said[planted.names[0]]
    spoilt = planted.spoil(right)
    assert said.keys() == {n for n in right if spoilt[n].tobytes() != right[n].tobytes()}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "hf"])
def test_layouts_are_brought_together(family: str, layout: str) -> None:
    config, prefix = CONFIGS[family], USUAL_PREFIX[family]
    hf = memory(base_arrays(config, prefix), config=config)
    target = convert(hf, LAYOUTS[layout], computed_dtype=F32).plan.target
    other = Checkpoint(target.tensors)
    for result in (diff(hf, other), diff(other, hf)):
        assert tensors(result).keys() == hf.keys()
        assert result.passed, result.findings


def test_a_fault_behind_another_layout_is_named_in_hugging_faces_names() -> None:
    hf = memory(HF_NAMES, config=GEMMA3)
    other = arrays(convert(hf, LAYOUTS["tunix"]).plan.target)
    other["layers.1.attn.kv_einsum.w"] = other["layers.1.attn.kv_einsum.w"][::-1].copy()
    result = diff(hf, memory(other))
    assert {finding.where for finding in result.findings} == {
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
    }


def test_one_layout_without_a_config_is_compared_by_its_own_names() -> None:
    hf = memory(HF_NAMES, config=GEMMA3)
    tunix = arrays(convert(hf, LAYOUTS["tunix"]).plan.target)
    spoilt = {**tunix, "layers.0.attn.q_einsum.w": -tunix["layers.0.attn.q_einsum.w"]}
    result = diff(memory(tunix), memory(spoilt))
    (finding,) = result.findings
    assert finding.where == "layers.0.attn.q_einsum.w"
    assert "multiplied by -1" in finding.what


def test_two_layouts_without_dimensions_are_an_error() -> None:
    hf = memory(HF_NAMES, config=GEMMA3)
    tunix = memory(arrays(convert(hf, LAYOUTS["tunix"]).plan.target), source="b")
    with pytest.raises(
        InputError, match=r"neither has a config\.json; name the model with --model"
    ):
        diff(memory(HF_NAMES, source="a"), tunix)


def test_prefixes_do_not_count() -> None:
    renamed = {n.replace("model.", "language_model.model."): a for n, a in HF_NAMES.items()}
    assert diff(memory(HF_NAMES), memory(renamed)).passed


def test_names_of_no_layout_are_compared_as_they_are() -> None:
    result = diff(memory({"x": np.float32([1, 2])}), memory({"x": np.float32([1, 3])}))
    assert [f.where for f in result.findings] == ["x"]
    assert "no known layout" in result.notes[0]


def test_what_differs_most_comes_first_and_the_same_last() -> None:
    q = "model.layers.{}.self_attn.q_proj.weight".format
    changed = dict(HF_NAMES)
    del changed["model.norm.weight"]
    changed["extra"] = np.ones(3, np.float32)
    changed[q(0)] = (HF_NAMES[q(0)].astype(np.float32) * 1.5).astype(BF16)
    changed[q(1)] = (HF_NAMES[q(1)].astype(np.float32) * 3).astype(BF16)
    changed["model.layers.0.input_layernorm.weight"] = np.ones(9, BF16)
    changed["model.layers.1.input_layernorm.weight"] = HF_NAMES[
        "model.layers.1.input_layernorm.weight"
    ].astype(np.float32)
    listed = diff(memory(HF_NAMES), memory(changed)).data["tensors"]
    assert {row["status"] for row in listed[:3]} == {"only in A", "only in B", "shape"}
    assert [row["name"] for row in listed[3:6]] == [
        q(1),
        q(0),
        "model.layers.1.input_layernorm.weight",
    ]
    assert {row["status"] for row in listed[6:]} == {"same"}


def test_the_rows_that_both_have_are_compared() -> None:
    name = "model.embed_tokens.weight"
    longer = {**HF_NAMES, name: np.concatenate([HF_NAMES[name], HF_NAMES[name][:2]])}
    (finding,) = diff(memory(HF_NAMES), memory(longer)).findings
    assert finding.what == (
        "shape [23, 10] and [25, 10]; of the common rows, 0 of 230 values differ"
    )


def test_modules_and_layers_are_added_up() -> None:
    q = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    changed = {**HF_NAMES, q[1]: -HF_NAMES[q[1]]}
    result = diff(memory(HF_NAMES), memory(changed))
    modules = {row["group"]: row for row in result.data["modules"]}
    a = np.concatenate([HF_NAMES[name].astype(np.float64).ravel() for name in q])
    b = np.concatenate([changed[name].astype(np.float64).ravel() for name in q])
    expected = np.linalg.norm(b - a) / np.linalg.norm(a)
    assert modules["self_attn.q_proj"]["relative_frobenius"] == pytest.approx(expected, rel=1e-12)
    assert modules["self_attn.k_proj"]["same_bytes"]
    layers = {row["group"]: row["unequal"] for row in result.data["layers"]}
    assert layers == {0: 0, 1: HF_NAMES[q[1]].size, None: 0}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.12.self_attn.q_proj.weight", ("self_attn.q_proj", 12)),
        ("model.language_model.layers.3.layer_scalar", ("layer_scalar", 3)),
        ("layers.0.attn.kv_einsum.w", ("attn.kv_einsum", 0)),
        ("transformer/layer_7/mlp/gating_einsum", ("mlp.gating_einsum", 7)),
        ("model.embed_tokens.weight", ("model.embed_tokens", None)),
        ("layers.9" + "0" * 5000 + ".w", ("layers.9" + "0" * 5000, None)),
    ],
)
def test_places(name: str, expected: tuple[str, int | None]) -> None:
    assert place(name) == expected


def test_a_merged_lora_is_recognised_with_its_rank() -> None:
    config = {**GEMMA3, "hidden_size": 30, "intermediate_size": 44, "head_dim": 14}
    base = base_arrays(config, "model.", F32)
    factors = factor_arrays(config, F32)
    tuned = dict(base)
    for short, delta in lora_oracle.deltas(factors, 5.0).items():
        name = f"model.{short}"
        tuned[name] = (base[name].astype(np.float64) + delta).astype(np.float32)
    result = diff(memory(base), memory(tuned))
    assert {finding.where for finding in result.findings} == {n for n in base if "_proj" in n}
    assert all(row["looks_like"] == "like a LoRA of rank 2" for row in result.data["tensors"][:14])
    assert dict(result.summary)["LoRA"] == "14 of 14 changed matrices look like one: rank 2"


def test_experts_are_told_by_their_matrices() -> None:
    random = np.random.default_rng(4)
    shape = (5, 33, 26)
    weight = random.normal(0, 0.05, shape).astype(F32)
    change = random.normal(0, 0.1, (5, 33, 2)) @ random.normal(0, 0.1, (5, 2, 26))
    change[3] = 0
    name = "model.layers.0.experts.down_proj"
    result = diff(memory({name: weight}), memory({name: (weight + change).astype(F32)}))
    (row,) = result.data["tensors"]
    told = "of 5 matrices along the first axis: like a LoRA of rank 2 in 4"
    assert (row["looks_like"], row["rank"]) == (told, 2)
    assert dict(result.summary)["LoRA"] == "4 of 4 changed matrices look like one: rank 2"


@pytest.mark.parametrize("values", [[10**12, -(10**12), 3], [10**12, 3], [2**62, -(2**62), 3]])
def test_a_factor_of_integers_is_exact(values: list[int]) -> None:
    """One of them is off by 1, which float64 need not show."""
    old = np.array(values, np.int64)
    new = -old
    new[0] += 1
    (row,) = diff(memory({"a": old}), memory({"a": new})).data["tensors"]
    assert "multiplied" not in row["looks_like"]
    small = np.arange(2, 9, dtype=np.int64) * 10**12
    (row,) = diff(memory({"a": small}), memory({"a": -3 * small})).data["tensors"]
    assert row["looks_like"] == "every value is multiplied by -3"


def test_a_rank_beyond_those_sought_names_the_option() -> None:
    random = np.random.default_rng(3)
    weight = random.normal(size=(33, 26)).astype(F32)
    other = (weight + random.normal(size=(33, 26))).astype(F32)
    (row,) = diff(memory({"a": weight}), memory({"a": other}), probes=5).data["tensors"]
    assert row["looks_like"] == "of rank 5 or more (--probes looks further)"


@pytest.mark.parametrize("factor", [1.5, 640**0.5, 0.98, -0.3])
def test_a_factor_that_was_rounded_is_named(factor: float) -> None:
    """As of an embedding that another layout keeps scaled: no value is exactly the product."""
    weight = np.random.default_rng(6).normal(0, 0.05, (33, 26)).astype(BF16)
    scaled = (weight.astype(np.float64) * factor).astype(BF16)
    (row,) = diff(memory({"a": weight}), memory({"a": scaled})).data["tensors"]
    assert row["looks_like"] == f"every value is multiplied by {factor:.3g} and rounded"
    scaled[3, 5] *= BF16.type(1.1)  # one that is something else
    (row,) = diff(memory({"a": weight}), memory({"a": scaled})).data["tensors"]
    assert "multiplied" not in row["looks_like"]


def test_keys_of_the_config_that_differ_are_told() -> None:
    a = {**GEMMA3, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    b = {**GEMMA3, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}, "dtype": "float32"}
    result = diff(memory(HF_NAMES, config=a), memory(HF_NAMES, config=b))
    assert result.data["config"] == {"rope_parameters.full_attention.rope_theta": [1e6, 1e4]}


def test_csv_has_a_line_for_each_tensor() -> None:
    result = diff(memory(HF_NAMES), memory(HF_NAMES))
    rows = list(csv.DictReader(io.StringIO(as_csv(result))))
    assert {row["name"] for row in rows} == HF_NAMES.keys()
    q = next(row for row in rows if row["name"] == "model.layers.1.self_attn.q_proj.weight")
    assert (q["shape_a"], q["module"], q["layer"]) == ("42x10", "self_attn.q_proj", "1")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base", GEMMA3, HF_NAMES)
    name = "model.layers.0.pre_feedforward_layernorm.weight"
    wrong = write_base(
        tmp_path / "wrong", GEMMA3, {**HF_NAMES, name: HF_NAMES[name] + BF16.type(1)}
    )
    tunix = write_run(
        tmp_path / "run",
        arrays(convert(memory(HF_NAMES, config=GEMMA3), LAYOUTS["tunix"]).plan.target),
    )
    assert run_cli("diff", base, tunix, "--exit-code") == 0
    assert run_cli("diff", base, wrong) == 0
    capsys.readouterr()
    assert run_cli("diff", base, wrong, "--json", "--exit-code") == 1
    told = json.loads(capsys.readouterr().out)
    assert [finding["where"] for finding in told["findings"]] == [name]
    assert run_cli("diff", base, wrong, "--csv") == 0
    assert capsys.readouterr().out.startswith("name,module,layer,status,")


def test_json_and_csv_are_two_things(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("diff", "a", "b", "--json", "--csv") == 2
    assert "--json and --csv both print the tensors: give one" in capsys.readouterr().err


def test_a_broken_value_is_told() -> None:
    name = next(n for n, a in HF_NAMES.items() if a.ndim == 2)
    broken = {**HF_NAMES, name: HF_NAMES[name].copy()}
    broken[name][1, 2] = np.nan
    (finding,) = diff(memory(HF_NAMES), memory(broken)).findings
    size = HF_NAMES[name].size
    assert (finding.where, finding.what) == (
        name,
        f"1 of {size} values differ, 1 of them NaN or infinite",
    )
    broken[name][0, 1] += BF16.type(2)
    most = float(broken[name][0, 1]) - float(HF_NAMES[name][0, 1])
    result = diff(memory(HF_NAMES), memory(broken))
    assert result.findings[0].what.startswith(
        f"2 of {size} values differ, 1 of them NaN or infinite, the others by up to {most:.4g}, "
    )
    assert dict(result.summary)["not finite"] == "1 of those, in one of the two"


def test_a_config_that_says_otherwise_is_told() -> None:
    """Keys that both have: a default may stand for one that is left out."""
    other = {**GEMMA3, "rope_theta": 1e4, "_name_or_path": "elsewhere", "new_key": 3}
    one = {**GEMMA3, "rope_theta": 1e6}
    result = diff(memory(HF_NAMES, config=one), memory(HF_NAMES, config=other))
    assert [(f.where, f.what) for f in result.findings] == [
        ("config.json", "rope_theta is 1000000.0 in A and 10000.0 in B")
    ]


def test_what_is_not_finite_is_the_worst_and_comes_first() -> None:
    q = "model.layers.{}.self_attn.q_proj.weight".format
    broken = {**HF_NAMES, q(0): -HF_NAMES[q(0)], q(1): HF_NAMES[q(1)].copy()}
    del broken["model.norm.weight"]
    broken[q(1)][3, 2] = np.nan
    result = diff(memory(HF_NAMES), memory(broken))
    assert [row["name"] for row in result.data["tensors"][:3]] == [q(1), "model.norm.weight", q(0)]
    rows = list(csv.DictReader(io.StringIO(as_csv(result))))
    assert [row["not_finite"] for row in rows[:3]] == ["1", "", "0"]


@pytest.mark.parametrize("dtype", [BF16, F32, np.dtype(np.float64)])
@pytest.mark.parametrize("large", [1.0, 1e6])
def test_one_value_that_changed_is_no_factor(dtype: np.dtype[Any], large: float) -> None:
    """By a unit in the last place, or more of a value that dominates all sums."""
    weight = np.random.default_rng(6).normal(0, 0.05, (33, 26)).astype(dtype)
    weight[3, 5] = large
    for change in (2 * float(ml_dtypes.finfo(dtype).eps), 1e-5, 0.1):
        changed = weight.copy()
        changed[3, 5] = dtype.type(large * (1 + change))
        (row,) = diff(memory({"a": weight}), memory({"a": changed})).data["tensors"]
        assert "multiplied" not in row["looks_like"]
        if row["unequal"] and dtype != BF16:
            assert row["looks_like"] == "like a LoRA of rank 1"


def test_a_constant_that_hides_a_nan_is_none() -> None:
    weight = np.random.default_rng(6).normal(0, 0.05, (33, 26)).astype(F32)
    for constant in (0.0, 2.5):
        other = np.full_like(weight, constant)
        (row,) = diff(memory({"a": weight}), memory({"a": other})).data["tensors"]
        assert row["looks_like"] == f"every value is {constant:g}"
        other[4, 4] = np.nan
        (row,) = diff(memory({"a": weight}), memory({"a": other})).data["tensors"]
        assert row["looks_like"] == ""


def test_rows_moved_around_the_end_are_told_by_most_of_them() -> None:
    weight = np.random.default_rng(6).normal(0, 0.05, (101, 26)).astype(F32)

    def told(other: Any) -> str:
        (row,) = diff(memory({"a": weight}), memory({"a": other})).data["tensors"]
        return str(row["looks_like"])

    assert "first, 64 by +37 and 37 by -64, around the end: row [0]" in told(np.roll(weight, 64, 0))
    assert "first, 97 by +4 and 4 by -97, around the end: row [0]" in told(np.roll(weight, -4, 0))
    moved = weight.copy()
    moved[10:40] = weight[3:33]
    assert "30 of 101 rows hold another row of the first, all by -7: row [10]" in told(moved)
    assert "of the first: row [0] is the first's [100]" in told(weight[::-1].copy())


@pytest.mark.parametrize(
    ("start", "written"),
    [
        ("=", "'="),
        ("+", "'+"),
        ("-", "'-"),
        ("@", "'@"),
        ("'", "''"),
        ("\t=", "\\t="),
        ("\r=", "\\r="),
        ("\n=", "\\n="),
        ("\x1b[2J", "\\x1b[2J"),
    ],
)
def test_a_name_is_no_formula_of_a_spreadsheet(start: str, written: str) -> None:
    name = f"{start}HYPERLINK(1)"
    result = diff(memory({name: np.float32([1, -2])}), memory({name: np.float32([1, 2])}))
    (row,) = csv.DictReader(io.StringIO(as_csv(result), newline=""))
    assert row["name"] == f"{written}HYPERLINK(1)"
    assert row["cosine"].startswith("-0.6")  # a number stays one
