"""Validation of a merge: right ones pass, each wrong one is named with its cause."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.validation import merged as merged_check
from gemma_convert.convert.validation.exact import interval
from gemma_convert.convert.validation.merged import planned, validate_merged
from gemma_convert.convert.validation.result import Result
from gemma_convert.surgery.adapters.open import Source
from tests import lora_oracle
from tests.checkpoints import (
    ALPHA,
    BF16,
    CONFIGS,
    F32,
    GEMMA3,
    RANK,
    USUAL_PREFIX,
    arrays,
    base_arrays,
    factor_arrays,
    memory,
    run_cli,
    write_base,
    write_run,
)

BASE = base_arrays(GEMMA3, "model.")
FACTORS = factor_arrays(GEMMA3)
QUERY = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
PAIRED = {name for name in BASE if "_proj" in name}


def merged_by_hand(
    scale: float = 1.0, dtype: np.dtype[np.generic] = BF16, factors: Mapping[str, Array] = FACTORS
) -> dict[str, Array]:
    """Base + scale * alpha / r A.B, computed in float64 and rounded once."""
    exact = lora_oracle.merged(BASE, "model.", factors, scale * ALPHA)
    return {name: array.astype(dtype) for name, array in exact.items()}


def validated(out: Mapping[str, Array], **options: Any) -> Result:
    written = memory(out, config=GEMMA3, source="out")
    run, base = memory(FACTORS, source="run"), memory(BASE, config=GEMMA3, source="base")
    return validate_merged(written, planned(written, run, base, alpha=ALPHA), **options)


def said(result: Result) -> dict[str, str]:
    return {finding.where: finding.what for finding in result.findings}


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), F32])
@pytest.mark.parametrize("every", [False, True])
def test_a_merge_in_float64_rounded_once_passes(dtype: np.dtype[np.generic], every: bool) -> None:
    result = validated(merged_by_hand(dtype=dtype), every=every)
    assert result.passed, result.findings
    assert result.data["tensors"].keys() == PAIRED
    checked = sum(row["checked"] for row in result.data["tensors"].values())
    assert checked == sum(BASE[name].size for name in PAIRED)  # tiny: a sample is all of it


def test_the_survival_is_that_of_float64() -> None:
    found = validated(merged_by_hand()).data["tensors"][QUERY]
    delta = lora_oracle.deltas(FACTORS, ALPHA)[QUERY.removeprefix("model.")]
    change = merged_by_hand()[QUERY].astype(np.float64) - BASE[QUERY].astype(np.float64)
    expected = np.linalg.norm(change - delta) / np.linalg.norm(delta)
    assert found["relative_error"] == pytest.approx(expected, rel=1e-10)


def rounded_before_the_sum() -> dict[str, Array]:
    """Each delta rounded to bfloat16, then added and rounded again."""
    out = dict(BASE)
    for short, delta in lora_oracle.deltas(FACTORS, ALPHA).items():
        name = f"model.{short}"
        early = delta.astype(BF16).astype(np.float64)
        out[name] = (BASE[name].astype(np.float64) + early).astype(BF16)
    return out


WRONG: dict[str, tuple[Callable[[], dict[str, Array]], str]] = {
    "applied twice": (
        lambda: merged_by_hand(2.0),
        "the adapter was applied twice, or it was scaled by alpha",
    ),
    "alpha / r^2": (lambda: merged_by_hand(1 / RANK), "it was scaled by alpha / r^2"),
    "alpha / sqrt(r)": (lambda: merged_by_hand(RANK**0.5), "it was scaled by alpha / sqrt(r)"),
    "another alpha": (lambda: merged_by_hand(1.2), "what was added is 1.201 times alpha / r A.B"),
    "subtracted": (lambda: merged_by_hand(-1.0), "the adapter was subtracted"),
    "not applied": (lambda: dict(BASE), "the adapter was not applied"),
    "bfloat16 sum order": (
        rounded_before_the_sum,
        "the delta was rounded to bfloat16 before it was added",
    ),
    "another run's factors": (
        lambda: merged_by_hand(factors=factor_arrays(GEMMA3, seed=9)),
        "what was added is not this pair's A.B",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_merge_is_named_with_its_cause(wrong: str) -> None:
    make, cause = WRONG[wrong]
    found = said(validated(make(), every=True))
    assert found.keys() == PAIRED
    assert cause in found[QUERY]


def test_k_and_v_swapped_are_named() -> None:
    out = merged_by_hand()
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv"]
    out[names[0]], out[names[1]] = out[names[1]], out[names[0]]
    assert said(validated(out)).keys() == set(names)


def test_one_weight_one_step_off_is_listed() -> None:
    out = merged_by_hand()
    bits = out[QUERY].copy().view(np.uint16)
    bits[5, 3] += 1
    out[QUERY] = bits.view(BF16)
    found = said(validated(out, every=True))
    assert found.keys() == {QUERY}
    assert found[QUERY].startswith("1 of 420 weights are not the rounded sum; at [5, 3] expected")


def test_what_has_no_pair_must_be_the_bases_bytes() -> None:
    norm, embedding = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
    out = merged_by_hand()
    out[norm] = out[norm] + BF16.type(1)
    out[embedding] = np.roll(out[embedding], 3, axis=0)
    found = said(validated(out))
    assert found[norm] == "10 of 10 values are not the base's: every value is off by +1"
    assert "row [0] is the first's [20]" in found[embedding]


def test_names_shapes_and_dtypes() -> None:
    out = merged_by_hand()
    norm = "model.layers.1.input_layernorm.weight"
    del out["model.norm.weight"]
    out["extra"] = np.ones(2, BF16)
    out[norm] = out[norm].astype(np.float32)
    out[QUERY] = out[QUERY][:-1]
    assert said(validated(out)) == {
        "model.norm.weight": "missing",
        "extra": "not part of the merge",
        norm: "expected bfloat16 [10], found float32 [10]",
        QUERY: "expected bfloat16 [42, 10], found bfloat16 [41, 10]",
    }


def test_a_sample_reads_some_blocks_of_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_check, "SAMPLE_BYTES", 60)  # three rows of ten bfloat16
    result = validated(merged_by_hand())
    assert result.data["tensors"][QUERY]["checked"] == 4 * 30
    everything = validated(merged_by_hand(), every=True)
    assert everything.data["tensors"][QUERY]["checked"] == 420


def test_without_factors_there_is_nothing_to_check() -> None:
    out = memory(BASE, config=GEMMA3)
    job = planned(out, memory(BASE, config=GEMMA3, source="run"), None)
    with pytest.raises(InputError, match="run: no LoRA factors there; give the adapter"):
        validate_merged(out, job)


def test_every_order_of_float32_sums_lies_in_the_interval() -> None:
    """And the interval is no wider than it must be: a few units in the last place of the sum."""
    random = np.random.default_rng(5)
    rank, scale = 24, 16 / 24
    a, b = random.normal(size=(500, rank)), random.normal(size=(rank, 1))
    a, b = a.astype(np.float32), b.astype(np.float32)
    weight = random.normal(size=500).astype(np.float32)
    exact = scale * (a.astype(np.float64) @ b.astype(np.float64))[:, 0]
    bound = scale * (rank + 5) * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b))[:, 0]
    _, low, high = interval(weight, exact, bound)
    for _ in range(20):
        order = random.permutation(rank)
        total = np.zeros(500, np.float32)
        for i in order:
            total += a[:, i] * b[i, 0]
        result = weight + np.float32(scale) * total
        assert np.all((low <= result) & (result <= high))
    size = scale * (np.abs(a) @ np.abs(b))[:, 0] + np.abs(weight)
    assert np.all(high - low < 2 * (rank + 8) * 2.0**-24 * size)


@pytest.fixture(params=CONFIGS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Path]:
    """Base, run and our own merge on the disk."""
    config, prefix = CONFIGS[request.param], USUAL_PREFIX[request.param]
    base = write_base(tmp_path / "base", config, base_arrays(config, prefix), shards=2)
    run = write_run(tmp_path / "run", factor_arrays(config))
    out = tmp_path / "out"
    words = ["orbax-to-hf", run, "--base", base, "--out", out, "--alpha", ALPHA, "--quiet"]
    assert run_cli(*words) == 0
    return {"base": base, "run": run, "out": out}


def result_of(written: dict[str, Path]) -> Result:
    out, run = open_checkpoint(written["out"]), open_checkpoint(written["run"])
    return validate_merged(out, planned(out, run, open_base(written["base"]), alpha=ALPHA))


def check(written: dict[str, Path], *words: str) -> int:
    given = ["--base", written["base"], "--adapter", written["run"], "--alpha", ALPHA]
    return run_cli("validate", "merged", written["out"], *given, *words)


def test_our_own_merge_passes(written: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert check(written, "--all", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["passed"], told["notes"]) == (True, [])


def test_the_ledger_must_tell_of_the_files_that_are_there(
    written: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = written["out"]
    (out / "added.txt").write_text("x")
    (out / "config.json").write_text((out / "config.json").read_text() + "\n")
    capsys.readouterr()
    assert check(written, "--json") == 1
    told = {row["where"]: row["what"] for row in json.loads(capsys.readouterr().out)["findings"]}
    assert told.keys() == {"added.txt", "config.json"}
    assert told["added.txt"] == "not in the ledger"
    assert "is not what the ledger says" in told["config.json"]


def test_the_ledger_must_tell_of_this_adapter(written: dict[str, Path]) -> None:
    path = written["out"] / "conversion.json"
    ledger = json.loads(path.read_text())
    ledger["adapters"][0] |= {"pairs_applied": 1, "factors_sha256": "0"}
    path.write_text(json.dumps(ledger))
    result = result_of(written)
    told = [finding.what for finding in result.findings]
    count = len(ledger["adapters"][0]["unchanged"]) + ledger["adapters"][0]["pairs_changed"]
    assert told[0] == f"adapters[0].pairs_applied is 1, expected {count}"
    assert told[1].startswith("adapters[0].factors_sha256 is '0', expected '")


FALSE: list[tuple[tuple[Any, ...], Any]] = [
    (("adapters", 0, "pairs_changed"), 3),
    (("adapters", 0, "unchanged"), ["layers.0.attn.q_einsum.w"]),
    (("adapters", 0, "ranks"), [3]),
    (("adapters", 0, "weight"), True),
    (("bytes",), 5),
    (("counts", "merged"), 2),
    (("counts", "dropped"), 7),
    (("model", "layers"), 9),
    (("layouts", "from"), "tunix"),
    (("layouts", "to"), "maxtext"),
    (("dropped",), None),
    (("dropped",), []),
    (("notes",), "none"),
    (("notes",), [3]),
    (("inputs",), {}),
    (("inputs", 0, "fingerprint"), ["x"]),
    (("survival", "weights"), 1),
    (("survival", "weights_changed"), 5),
    (("survival", "relative_error"), 0.5),
    (("survival", "relative_error"), float("nan")),
    (("survival", "relative_error"), None),
    (("survival_by_tensor", "NAME", "relative_error"), 0.0),
    (("survival_by_tensor", "NAME", "weights_changed"), 1),
    (("tensors", "NAME", "action"), "copied"),
    (("tensors", "NAME", "dtype"), "float32"),
    (("tensors", "NAME", "shape", 0), 1),
    (("merged", 0, "weight"), 2.0),
    (("base",), "nf4"),
    (("base", "used"), 3),
]


@pytest.mark.parametrize("written", ["gemma3"], indirect=True)
@pytest.mark.parametrize(("keys", "value"), FALSE)
def test_a_false_field_is_a_finding(
    keys: tuple[Any, ...], value: Any, written: dict[str, Path]
) -> None:
    path = written["out"] / "conversion.json"
    ledger = json.loads(path.read_text())
    name = next(iter(ledger["survival_by_tensor"]))
    *above, last = [name if key == "NAME" else key for key in keys]
    holder = ledger
    for key in above:
        holder = holder.setdefault(key, {}) if isinstance(holder, dict) else holder[key]
    holder[last] = value
    path.write_text(json.dumps(ledger))
    told = [finding for finding in result_of(written).findings if finding.where == path.name]
    assert told
    for finding in told:
        assert finding.what.startswith(keys[0])
        assert "\n" not in finding.what


@pytest.mark.parametrize("written", ["gemma3"], indirect=True)
@pytest.mark.parametrize("other", [None, True, 41, "text", [], [[]], {}, {"x": 1}, [{"x": []}]])
def test_any_type_in_any_place_is_a_finding(other: Any, written: dict[str, Path]) -> None:
    path = written["out"] / "conversion.json"
    right = json.loads(path.read_text())
    places: list[tuple[str, ...]] = [
        *((key,) for key in ("output", "adapters", "tensors", "counts", "survival", "merged")),
        ("output", "files"),
        ("output", "files", "config.json"),
        ("tensors", next(iter(right["tensors"]))),
        ("model", "layers"),
    ]
    for *above, last in places:
        ledger = json.loads(json.dumps(right))
        holder = ledger
        for key in above:
            holder = holder[key]
        holder[last] = other
        path.write_text(json.dumps(ledger))
        assert result_of(written).findings, (above, last)
    path.write_text(json.dumps({**right, "adapters": [other]}))
    assert result_of(written).findings


@pytest.mark.parametrize("written", ["gemma3"], indirect=True)
@pytest.mark.parametrize("key", ["dropped", "notes", "inputs", "layouts", "survival", "tensors"])
def test_a_field_that_was_deleted_is_a_finding(key: str, written: dict[str, Path]) -> None:
    path = written["out"] / "conversion.json"
    ledger = json.loads(path.read_text())
    del ledger[key]
    path.write_text(json.dumps(ledger))
    told = [finding.what for finding in result_of(written).findings if finding.where == path.name]
    assert told[0].startswith((f"{key} is None, expected", f"{key} is not there, expected"))


@pytest.mark.parametrize("written", ["gemma3"], indirect=True)
def test_of_a_sample_survival_is_bounded(
    written: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that were looked at changed at least so many weights, and left some."""
    monkeypatch.setattr(merged_check, "SAMPLE_BYTES", 60)
    path = written["out"] / "conversion.json"
    right = json.loads(path.read_text())
    name = next(n for n, one in right["survival_by_tensor"].items() if one["weights"] > 150)
    one = right["survival_by_tensor"][name]
    for value, passes in (
        (one["weights_changed"] - 1, True),
        (1, False),
        (one["weights"] + 1, False),
    ):
        ledger = json.loads(json.dumps(right))
        ledger["survival_by_tensor"][name]["weights_changed"] = value
        path.write_text(json.dumps(ledger))
        told = [finding.what for finding in result_of(written).findings]
        assert (told == []) == passes, told
        assert all(f"weights_changed is {value}, expected " in what for what in told)


@pytest.mark.parametrize("written", ["gemma3"], indirect=True)
def test_other_input_files_are_a_note(written: dict[str, Path]) -> None:
    """Their values are compared, and may be the same; a copy made later has the same header."""
    shard = next(written["base"].glob("*.safetensors"))
    os.utime(shard, (1, 1))
    result = result_of(written)
    assert (result.passed, result.notes) == (True, ())
    path = written["out"] / "conversion.json"
    ledger = json.loads(path.read_text())
    ledger["inputs"][1]["fingerprint"][shard.name] = "sha256:0 size:1 mtime_ns:5"
    path.write_text(json.dumps(ledger))
    result = result_of(written)
    assert result.passed
    (note,) = result.notes
    assert note.startswith("the ledger tells of other input files than those given here, such as ")
    assert shard.name in note


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("strange", "told"),
    [
        (np.nan, "some are NaN or infinite"),
        (np.inf, "some are NaN or infinite"),
        (1e-3, ", but not in each weight"),
    ],
)
def test_single_weights_that_are_wrong_are_no_wrong_scale(
    count: int, strange: float, told: str
) -> None:
    base = memory(base_arrays(GEMMA3, "model.", F32), config=GEMMA3, source="base")
    adapters = [
        Source(memory(factor_arrays(GEMMA3, F32, seed=seed), source=f"run{seed}"))
        for seed in range(count)
    ]
    job = planned(base, base, None, alpha=ALPHA, adapters=adapters)
    out = arrays(job.plan.target)
    out[DOWN] = out[DOWN].copy()
    out[DOWN][3, 5] += F32.type(strange)
    (finding,) = validate_merged(memory(out, config=GEMMA3, source="out"), job).findings
    assert finding.where == DOWN
    assert finding.what.endswith(told)


def test_a_sample_believes_which_pairs_changed_nothing(
    written: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not of one that it saw change something, nor a count that disagrees with the names."""
    monkeypatch.setattr(merged_check, "SAMPLE_BYTES", 60)
    path = written["out"] / "conversion.json"
    assert result_of(written).passed
    ledger = json.loads(path.read_text())
    ledger["adapters"][0]["pairs_changed"] -= 1
    path.write_text(json.dumps(ledger))
    assert [finding.what.split()[0] for finding in result_of(written).findings] == [
        "adapters[0].pairs_changed"
    ]


@pytest.mark.parametrize("written", ["gemma3"], indirect=True)
@pytest.mark.parametrize(
    ("data", "told"),
    [(b"\xff\xfe{}", "is not UTF-8"), (b"[]", "must be a JSON object, found list")],
)
def test_a_ledger_that_cannot_be_read_is_a_finding(
    data: bytes, told: str, written: dict[str, Path]
) -> None:
    (written["out"] / "conversion.json").write_bytes(data)
    (finding,) = result_of(written).findings
    assert finding.where == "conversion.json"
    assert told in finding.what


def test_without_a_ledger_a_note_says_so(written: dict[str, Path]) -> None:
    (written["out"] / "conversion.json").unlink()
    result = result_of(written)
    assert result.passed
    assert "no conversion.json" in result.notes[0]


def test_another_alpha_is_an_error_of_every_tensor(
    written: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    written_alpha = ["--base", written["base"], "--adapter", written["run"], "--alpha", 2 * ALPHA]
    assert run_cli("validate", "merged", written["out"], *written_alpha) == 1
    assert "what was added is 0.5" in " ".join(capsys.readouterr().out.split())


def test_a_checkpoint_with_weights_and_factors(tmp_path: Path) -> None:
    """Merged from itself; the base gives the config alone."""
    from gemma_convert.convert.jobs import hf_to_orbax

    tunix = hf_to_orbax(memory(BASE, config=GEMMA3)).plan.target
    own = {name: tensor.numpy() for name, tensor in tunix.items()}
    source = memory({**own, **FACTORS}, source="run")
    config = Checkpoint({}, config=GEMMA3, source="base")
    out = memory(merged_by_hand(), config=GEMMA3, source="out")
    job = planned(out, source, config, alpha=ALPHA)
    assert validate_merged(out, job).passed
    wrong = memory(merged_by_hand(2.0), config=GEMMA3, source="out")
    assert len(validate_merged(wrong, job).findings) == len(PAIRED)
