"""``surgery merge-lora`` and ``--adapter``: several adapters, weights, provenance, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.tensor import Array
from tests import lora_oracle
from tests.checkpoints import (
    BF16,
    F32,
    GEMMA3,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    snapshot,
    tunix_arrays,
    write_base,
    write_run,
)
from tests.peft_files import factors, write

Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"
SIZES = {Q: (10, 42), UP: (10, 11)}


@pytest.fixture
def two(tmp_path: Path) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    """A base on the disk and two adapters of the same modules, and all of their values."""
    base = base_arrays(GEMMA3, "model.", F32)
    write_base(tmp_path / "base", GEMMA3, base)
    adapters = []
    for seed, name in enumerate(("math", "style")):
        values = {k: v for p, s in SIZES.items() for k, v in factors(p, *s, seed=seed).items()}
        write(tmp_path / name, values, lora_alpha=3 + 2 * seed)
        adapters.append(values)
    return base, adapters


def merge(directory: Path, base: str, *adapters: str, out: str = "out", **options: Any) -> int:
    words: list[Any] = [
        "surgery",
        "merge-lora",
        directory / base,
        *(directory / a for a in adapters),
    ]
    for key, values in options.items():
        for value in values if isinstance(values, list) else [values]:
            words += [f"--{key}"] if value is True else [f"--{key}", value]
    return run_cli(*words, "--out", directory / out, "--quiet")


def exact(base: Array, adapters: list[dict[str, Array]], path: str, weights: Any) -> Array:
    """float64: the weight, and each delta by its alpha, rank and weight."""
    total = base.astype(np.float64)
    for seed, (values, weight) in enumerate(zip(adapters, weights, strict=True)):
        a, b = (values[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB")
        total = total + weight * (3 + 2 * seed) / 2 * (b.astype(np.float64) @ a)
    return total


@pytest.mark.parametrize("weights", [[], [1.0, 0.25], [-0.5, 2.0]])
def test_adapters_are_summed_by_weight(tmp_path: Path, two: Any, weights: list[float]) -> None:
    base, adapters = two
    assert merge(tmp_path, "base", "math", "style", weight=weights) == 0
    found = read_hf(tmp_path / "out")
    for path in SIZES:
        expected = exact(base[f"{path}.weight"], adapters, path, weights or [1, 1])
        # below 10 in size, a dozen float32 operations
        assert np.allclose(found.pop(f"{path}.weight"), expected, rtol=0, atol=1e-5)
        del base[f"{path}.weight"]
    assert_same_bits(found, base)
    ledger = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert [a["weight"] for a in ledger["adapters"]] == (weights or [1, 1])
    for adapter in ledger["adapters"]:
        assert [adapter[f"pairs_{x}"] for x in ("found", "applied", "changed")] == [2, 2, 2]


def test_one_after_the_other_is_both_at_once_but_for_one_rounding(tmp_path: Path, two: Any) -> None:
    """In float32, each merge rounds the sum once: two half units between them, at most."""
    assert merge(tmp_path, "base", "math", "style", out="both") == 0
    assert merge(tmp_path, "base", "math", out="one") == 0
    assert merge(tmp_path, "one", "style", out="two") == 0
    both, after = read_hf(tmp_path / "both"), read_hf(tmp_path / "two")
    for path in SIZES:
        one, other = both[f"{path}.weight"], after[f"{path}.weight"]
        largest = np.maximum(np.abs(one), np.abs(read_hf(tmp_path / "one")[f"{path}.weight"]))
        assert (np.abs(one - other) <= 2 * np.spacing(np.maximum(largest, 1))).all()
        assert not np.array_equal(one, read_hf(tmp_path / "one")[f"{path}.weight"])
    merged = json.loads((tmp_path / "two" / "conversion.json").read_text())["merged"]
    assert [Path(entry["source"]).name for entry in merged] == ["math", "style"]


def test_in_bfloat16_each_merge_adds_half_a_unit(tmp_path: Path, two: Any) -> None:
    """At once: half a unit of the exact sum. One by one: half a unit of what lay between, too."""
    base, adapters = two
    short = {name: array.astype(BF16) for name, array in base.items()}
    write_base(tmp_path / "short", GEMMA3, short)
    assert merge(tmp_path, "short", "math", "style", out="both") == 0
    assert merge(tmp_path, "short", "math", out="one") == 0
    assert merge(tmp_path, "one", "style", out="two") == 0
    both, one, after = (read_hf(tmp_path / name) for name in ("both", "one", "two"))
    for path in SIZES:
        name = f"{path}.weight"
        total = exact(short[name], adapters, path, [1, 1])
        float32 = 1e-5  # as above
        assert (np.abs(both[name] - total) <= half_unit(both[name]) + float32).all()
        bound = half_unit(one[name]) + half_unit(after[name]) + float32
        assert (np.abs(after[name] - total) <= bound).all()
        assert 0.01 < (both[name] != after[name]).mean() < 0.5  # which is why they go together


def half_unit(values: Array) -> Array:
    """Half of the distance of bfloat16 numbers, which have 8 bits, at each value's exponent."""
    exponents = np.frexp(values.astype(np.float64))[1]
    return np.ldexp(0.5, exponents - 8)


def test_bfloat16_is_rounded_once_for_all_adapters(tmp_path: Path, two: Any) -> None:
    """F16, through the command line: the oracle's sum in float64, rounded to bfloat16."""
    base, adapters = two
    short = {name: array.astype(BF16) for name, array in base.items()}
    write_base(tmp_path / "short", GEMMA3, short)
    assert merge(tmp_path, "short", "math", "style") == 0
    found = read_hf(tmp_path / "out")
    total = differ = 0
    for path in SIZES:
        expected = lora_oracle.rounded_to_bfloat16(
            exact(short[f"{path}.weight"], adapters, path, [1, 1])
        )
        total += expected.size
        differ += np.count_nonzero(found[f"{path}.weight"] != expected)
    assert differ <= total / 500  # float32's own error can carry a value across a tie


def test_adapters_of_both_kinds(tmp_path: Path, two: Any) -> None:
    base, adapters = two
    run = factor_arrays(GEMMA3, F32)
    write_run(tmp_path / "run", {**run, **tunix_arrays(GEMMA3, F32)})  # its weights are not used
    assert merge(tmp_path, "base", "math", "run", alpha=5) == 0
    added = lora_oracle.deltas(run, 5.0)[f"{Q.removeprefix('model.')}.weight"]
    expected = exact(base[f"{Q}.weight"], adapters[:1], Q, [1]) + added
    assert np.allclose(read_hf(tmp_path / "out")[f"{Q}.weight"], expected, rtol=0, atol=1e-5)
    notes = json.loads((tmp_path / "out" / "conversion.json").read_text())["notes"]
    assert any("used its LoRA factors, not the" in note for note in notes)


def test_an_orbax_base_keeps_its_layout(tmp_path: Path, two: Any) -> None:
    from gemma_convert.convert.readers import open_orbax

    weights = tunix_arrays(GEMMA3, F32)
    write_run(tmp_path / "tunix", weights)
    write_base(tmp_path / "config", GEMMA3, {})
    assert merge(tmp_path, "tunix", "math", config=tmp_path / "config") == 0
    found = arrays(open_orbax(tmp_path / "out"))
    q, up = "layers.1.attn.q_einsum.w", "layers.0.mlp.up_proj.kernel"
    old = lora_oracle.heads_last(weights[q])
    expected = exact(old, two[1][:1], Q, [1])
    assert np.allclose(lora_oracle.heads_last(found.pop(q)), expected, rtol=0, atol=1e-5)
    assert not np.array_equal(found.pop(up), weights[up])
    assert_same_bits(found, {n: a for n, a in weights.items() if n not in (q, up)})


def test_the_other_commands_take_adapters_too(tmp_path: Path, two: Any) -> None:
    write_run(tmp_path / "run", factor_arrays(GEMMA3, F32))
    common = ["--adapter", tmp_path / "math", "--weight", 0.5, "--quiet"]
    words = ["orbax-to-hf", tmp_path / "run", "--base", tmp_path / "base", "--alpha", 5]
    assert run_cli(*words, "--out", tmp_path / "one", *common) == 0
    words = ["convert", tmp_path / "base", "--to", "hf", "--adapter", tmp_path / "run"]
    words += ["--alpha", 5, "--weight", 1, "--out", tmp_path / "two"]
    assert run_cli(*words, *common) == 0
    one, two_ = read_hf(tmp_path / "one"), read_hf(tmp_path / "two")
    assert_same_bits(one, two_)
    added = lora_oracle.deltas(factor_arrays(GEMMA3, F32), 5.0)[
        f"{UP.removeprefix('model.')}.weight"
    ]
    expected = exact(two[0][f"{UP}.weight"], two[1][:1], UP, [0.5]) + added
    assert np.allclose(one[f"{UP}.weight"], expected, rtol=0, atol=1e-5)


def refused(directory: Path, message: str, capsys: Any, *words: Any, **options: Any) -> None:
    before = snapshot(directory)
    assert merge(directory, *words, **options) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", captured.err), captured.err
    assert snapshot(directory) == before


def test_the_same_adapter_twice_is_noticed(tmp_path: Path, two: Any, capsys: Any) -> None:
    """By its factors, wherever it lies, through a conversion in between; --force overrules."""
    assert merge(tmp_path, "base", "math", out="one") == 0
    assert merge(tmp_path, "one", "style", out="two") == 0
    words = ["hf-to-orbax", tmp_path / "two", "--layout", "tunix", "--out", tmp_path / "tunix"]
    assert run_cli(*words, "--quiet") == 0
    (tmp_path / "math").rename(tmp_path / "renamed")
    message = "renamed: it is merged into .* already, says the conversion.json there; leave it out"
    refused(tmp_path, message, capsys, "one", "renamed")
    refused(tmp_path, message, capsys, "two", "renamed")
    refused(tmp_path, message, capsys, "tunix", "renamed", config=tmp_path / "base")
    assert merge(tmp_path, "two", "renamed", force=True) == 0
    merged = json.loads((tmp_path / "out" / "conversion.json").read_text())["merged"]
    assert [Path(entry["source"]).name for entry in merged] == ["math", "style", "renamed"]


def test_dora_is_not_merged_after_others(tmp_path: Path, two: Any, capsys: Any) -> None:
    """Its norm is of the weights that it was trained on: at once the order does not matter."""
    _, (values, _) = two
    magnitude = {f"base_model.model.{Q}.lora_magnitude_vector": np.linspace(1, 3, 42).astype(F32)}
    dora = {name: array for name, array in values.items() if Q in name} | magnitude
    write(tmp_path / "dora", dora, use_dora=True, lora_alpha=9)
    assert merge(tmp_path, "base", "style", out="one") == 0
    message = "dora: DoRA, and others are merged into .*one: it changes weights by their norm"
    refused(tmp_path, message, capsys, "one", "dora")
    assert merge(tmp_path, "one", "dora", out="forced", force=True) == 0
    assert merge(tmp_path, "base", "style", "dora", out="both") == 0
    assert merge(tmp_path, "base", "dora", out="first") == 0
    assert merge(tmp_path, "first", "style", out="then") == 0
    both, then, forced = (read_hf(tmp_path / name) for name in ("both", "then", "forced"))
    for name, array in both.items():  # values below 8, three sums in float32
        np.testing.assert_allclose(then[name], array, rtol=0, atol=4e-6)
    assert np.abs(forced[f"{Q}.weight"] - both[f"{Q}.weight"]).max() > 0.1


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("second", range(3))
def test_the_same_adapter_in_another_format_is_noticed(
    tmp_path: Path, two: Any, first: int, second: int, capsys: Any
) -> None:
    """PEFT's, made Tunix's, made PEFT's again: k and v, whose A differ, are stacked on the way."""
    forms = ["math", "tunix", "again"]
    to_tunix = ["peft-to-orbax", tmp_path / "math", "--out", tmp_path / "tunix"]
    to_peft = ["orbax-to-peft", tmp_path / "tunix", "--out", tmp_path / "again"]
    for words in (to_tunix, to_peft):
        assert run_cli(*words, "--base", tmp_path / "base", "--quiet") == 0
    assert merge(tmp_path, "base", forms[first], out="one") == 0
    refused(
        tmp_path, f"{forms[second]}.*: it is merged into .* already", capsys, "one", forms[second]
    )
    if first != second:
        pair = (forms[first], forms[second])
        refused(
            tmp_path, f"{pair[1]}.*: .*{pair[0]}.* holds the same factors", capsys, "base", *pair
        )


def test_a_ledger_of_other_factors_says_nothing(tmp_path: Path, two: Any) -> None:
    """It stays behind where an exported adapter is trained on and saved in its place."""
    to_tunix = ["peft-to-orbax", tmp_path / "math", "--out", tmp_path / "tunix"]
    to_peft = ["orbax-to-peft", tmp_path / "tunix", "--out", tmp_path / "run"]
    for words in (to_tunix, to_peft):
        assert run_cli(*words, "--base", tmp_path / "base", "--quiet") == 0
    copytree(tmp_path / "style", tmp_path / "run", dirs_exist_ok=True)
    assert "same_as" in json.loads((tmp_path / "run" / "conversion.json").read_text())
    assert merge(tmp_path, "base", "math", out="one") == 0
    assert merge(tmp_path, "one", "run", out="two") == 0
    merged = json.loads((tmp_path / "two" / "conversion.json").read_text())["merged"]
    assert [entry["same_as"] for entry in merged] == [[], []]


def test_an_adapter_given_twice_is_noticed(tmp_path: Path, two: Any, capsys: Any) -> None:
    copytree(tmp_path / "math", tmp_path / "copy")
    refused(
        tmp_path,
        "copy: .*math holds the same factors; leave it out",
        capsys,
        "base",
        "math",
        "copy",
    )
    assert merge(tmp_path, "base", "math", "copy", force=True) == 0


def test_a_ledger_that_is_none_says_nothing(tmp_path: Path, two: Any) -> None:
    for text in ("[]", "{", '{"merged": 3}', '{"merged": [1, {"factors_sha256": 2}]}'):
        (tmp_path / "base" / "conversion.json").write_text(text)
        assert merge(tmp_path, "base", "math", force=True) == 0


def test_a_frozen_module_can_be_allowed(tmp_path: Path, two: Any, capsys: Any) -> None:
    _, adapters = two
    frozen = dict(adapters[0])
    frozen[f"base_model.model.{Q}.lora_B.weight"] = np.zeros((42, 2), F32)
    write(tmp_path / "frozen", frozen)
    message = (
        "q_proj.weight_lora_b is all zero: .*--allow-unchanged accepts modules that were frozen"
    )
    refused(tmp_path, message, capsys, "base", "frozen")
    assert merge(tmp_path, "base", "frozen", **{"allow-unchanged": True}) == 0
    ledger = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert ledger["adapters"][0]["unchanged"] == [f"{Q.removeprefix('model.')}.weight"]
    assert ledger["adapters"][0]["pairs_changed"] == 1


def test_adapters_that_cannot_be_merged(tmp_path: Path, two: Any, capsys: Any) -> None:
    refused(tmp_path, "weight 0; pass a finite one", capsys, "base", "math", weight=0)
    refused(tmp_path, "it holds no LoRA factors; give a PEFT", capsys, "base", "base")
    write_run(tmp_path / "run", factor_arrays(GEMMA3, F32))
    refused(tmp_path, "pass --alpha with the value", capsys, "base", "math", "run")
    refused(tmp_path, "no LoRA factors that --alpha 5 could scale", capsys, "base", "math", alpha=5)
    assert merge(tmp_path, "base", "math", "style", weight=[1]) == 2
    assert "2 adapters, but 1 times --weight" in capsys.readouterr().err
    saved = {**two[1][0], "base_model.model.model.norm.weight": np.ones(10, F32)}
    write(tmp_path / "saved", saved, modules_to_save=["norm"])
    refused(tmp_path, "cannot be done in part", capsys, "base", "saved", weight=0.5)
    write(tmp_path / "ending", saved, modules_to_save=["orm"])  # as PEFT takes it
    refused(
        tmp_path, r"norm.weight \(modules_to_save\), .* in part", capsys, "base", "ending", weight=2
    )
    bias = {**two[1][0], "base_model.model.vision_tower.fc1.bias": np.ones(5, F32)}
    write(tmp_path / "bias", bias, bias="all")
    refused(tmp_path, r"fc1.bias \(bias\), which cannot", capsys, "base", "bias", weight=0.5)
    saved["base_model.model.model.norm.weight"] = np.full(10, 2, F32)
    write(tmp_path / "again", saved, modules_to_save=["norm"])
    refused(
        tmp_path, "norm.weight: another adapter replaces it too", capsys, "base", "saved", "again"
    )
    other = {"base_model.model.model.norm.weight": np.ones(9, F32)}
    write(tmp_path / "other", {**two[1][0], **other}, modules_to_save=["norm"])
    refused(
        tmp_path,
        r"norm.weight: expected d = 10 by config.json, found shape \[9\]",
        capsys,
        "base",
        "other",
    )
    unknown = {"base_model.model.score.weight": np.ones((2, 10), F32)}
    write(tmp_path / "unknown", {**two[1][0], **unknown}, modules_to_save=["score"])
    refused(
        tmp_path, "it saved score.weight, which the base does not have", capsys, "base", "unknown"
    )


def test_little_left_of_a_delta_is_advised_on(tmp_path: Path, two: Any, capsys: Any) -> None:
    """Each tensor by itself: q keeps hardly anything in bfloat16, up nearly all."""
    base, adapters = two
    values = dict(adapters[0])
    values[f"base_model.model.{Q}.lora_B.weight"] = values[
        f"base_model.model.{Q}.lora_B.weight"
    ] * F32.type(6e-3)
    write(tmp_path / "faint", values)
    short = {name: array.astype(BF16) for name, array in base.items()}
    short[f"{Q}.weight"] = np.full_like(short[f"{Q}.weight"], 0.7)
    write_base(tmp_path / "short", GEMMA3, short)
    words = ["surgery", "merge-lora", tmp_path / "short", tmp_path / "faint", "--out"]
    assert run_cli(*words, tmp_path / "out") == 0
    text = " ".join(capsys.readouterr().err.split())
    assert "warning: 1 of 2 merged tensors keep less than half of their delta in the stored" in text
    assert f"such as {Q}.weight; ship the adapter unmerged (orbax-to-peft), or merge with" in text
    assert run_cli(*words, tmp_path / "wide", "--dtype", "float32") == 0
    assert "warning" not in capsys.readouterr().err


def test_alpha_is_for_those_that_do_not_say_it(tmp_path: Path, two: Any) -> None:
    """The source's is 7 by its metadata; the 5 given is the other's."""
    run = factor_arrays(GEMMA3, F32)
    write_run(tmp_path / "told", run, {"lora": {"alpha": 7}})
    write_run(tmp_path / "untold", {name: 2 * factor for name, factor in run.items()})
    words = ["orbax-to-hf", tmp_path / "told", "--base", tmp_path / "base", "--alpha", 5]
    words += ["--adapter", tmp_path / "untold", "--out", tmp_path / "out", "--quiet"]
    assert run_cli(*words) == 0
    adapters = json.loads((tmp_path / "out" / "conversion.json").read_text())["adapters"]
    assert [adapter["scales"] for adapter in adapters] == [[3.5], [2.5]]
