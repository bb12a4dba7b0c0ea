"""Adapters of QLoRA runs made into others: what is known of the base goes along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.tensor import Array
from tests.checkpoints import BF16, F32, assert_same_bits, read_hf, run_cli, write_base, write_run
from tests.test_orbax_samples import ALPHA, CONFIG, SAMPLES, convert, factors_of, trained
from tests.test_qlora_command import SCHEMES, by_hand, ledger

pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:(tunix|qwix)\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]

NF4 = {"weight_qtype": "nf4", "tile_size": 8}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base from which the samples were quantised, as a Hugging Face directory, bfloat16."""
    directory = tmp_path_factory.mktemp("plain")
    write_base(directory / "config", CONFIG, {})
    convert(directory, SAMPLES / "full_base", directory / "config")
    return directory / "out"


def widened(values: dict[str, Array]) -> dict[str, Array]:
    return {name: array.astype(F32) for name, array in values.items()}


def surgery(command: str, *words: Any) -> int:
    return run_cli("surgery", command, *words, "--quiet")


def lora_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = open_checkpoint(directory).metadata["custom_metadata"]["lora"]
    return found


def onto(directory: Path, run: Path, base: Path, sample: str, *more: Any) -> dict[str, Array]:
    """The merge onto the base quantised as ``sample``'s."""
    return convert(directory, run, base, "--base-quantization", *SCHEMES[sample], *more)


@pytest.mark.parametrize("sample", SCHEMES)
def test_widened_factors_merge_onto_the_codes_that_qwix_saved(
    tmp_path: Path, plain: Path, sample: str
) -> None:
    """The run was bfloat16; its checkpoint, as Tunix's, does not say so."""
    values = trained(sample)
    run = write_run(tmp_path / "run", factors_of(values))
    assert {array.dtype for array in factors_of(values).values()} == {BF16}
    words = [run, "--rank", 4, "--dtype", "float32", "--alpha", ALPHA]
    assert surgery("resize-lora", *words, "--out", tmp_path / "wide") == 0
    assert lora_of(tmp_path / "wide")["base_dtype"] == "bfloat16"
    found = onto(tmp_path, tmp_path / "wide", plain, sample)
    for name, array in by_hand(sample, values).items():
        assert found[name].tobytes() == array.tobytes(), name
    assert not any("was assumed" in note for note in ledger(tmp_path)["notes"])


@pytest.mark.parametrize("sample", SCHEMES)
def test_a_sum_in_float32_merges_onto_the_base_of_its_parts(
    tmp_path: Path, plain: Path, sample: str
) -> None:
    """Which base it was is told by how far the full one is from it."""
    values = factors_of(trained(sample))
    run = write_run(tmp_path / "run", values, {"lora": {"alpha": ALPHA}})
    write_run(tmp_path / "other", {n: a[...] * 2 for n, a in values.items()}, lora(ALPHA))
    words = [run, tmp_path / "other", "--out", tmp_path / "sum"]
    assert surgery("combine-lora", *words) == 0
    onto(tmp_path, run, plain, sample)
    (tmp_path / "out").rename(tmp_path / "direct")
    onto(tmp_path, tmp_path / "sum", plain, sample)
    direct = json.loads((tmp_path / "direct" / "conversion.json").read_text())["base"]
    assert ledger(tmp_path)["base"] == direct
    assert "from bfloat16" in direct["used"]


def lora(alpha: float, **fields: Any) -> dict[str, Any]:
    return {"lora": {"alpha": alpha, **fields}}


def test_there_and_back_through_peft(tmp_path: Path, plain: Path) -> None:
    """PEFT's config has no place for it: the ledger does."""
    sample = "qlora_int4_full"
    values = factors_of(trained(sample))
    run = write_run(tmp_path / "run", values, lora(ALPHA, weight_qtype="int4", tile_size=8))
    to_peft = ["orbax-to-peft", run, "--base", plain, "--out", tmp_path / "peft"]
    assert run_cli(*to_peft, "--dtype", "float32", "--quiet") == 0
    to_orbax = ["peft-to-orbax", tmp_path / "peft", "--base", plain, "--out", tmp_path / "again"]
    assert run_cli(*to_orbax, "--quiet") == 0
    again = lora_of(tmp_path / "again")
    assert again["base_dtype"] == "bfloat16"
    assert [(r["weight_qtype"], r["tile_size"]) for r in again["rules"]] == [("int4", 8)]
    found = convert(tmp_path, tmp_path / "again", plain, "--base-quantization", "int4")
    for name, array in by_hand(sample, trained(sample)).items():
        assert found[name].tobytes() == array.tobytes(), name


def test_what_is_not_stored_is_assumed_and_said(tmp_path: Path, plain: Path) -> None:
    sample = "qlora_int8_full"
    values = trained(sample)
    run = write_run(tmp_path / "run", widened(factors_of(values)), lora(ALPHA))
    assumed = onto(tmp_path, run, plain, sample)
    told = ledger(tmp_path)
    assert told["base"]["used"] == "int8, no tiles, from float32"
    note = "the dtype of the base in training is not stored: float32 was assumed, that of the"
    assert any(note in one for one in told["notes"])
    (tmp_path / "out").rename(tmp_path / "assumed")
    given = onto(tmp_path, run, plain, sample, "--base-dtype", "bfloat16")
    told = ledger(tmp_path)
    assert told["base"]["used"] == "int8, no tiles, from bfloat16"
    assert not any("was assumed" in one for one in told["notes"])
    for name, array in by_hand(sample, values).items():
        assert given[name].tobytes() == array.tobytes(), name
    assert any(given[name].tobytes() != assumed[name].tobytes() for name in given)


def test_an_assumption_is_not_stored(tmp_path: Path, plain: Path) -> None:
    """Factors that somebody widened stay silent of their base, so that it can still be said."""
    sample = "qlora_int4_full"
    values = trained(sample)
    run = write_run(tmp_path / "run", widened(factors_of(values)), lora(ALPHA))
    assert surgery("resize-lora", run, "--rank", 8, "--out", tmp_path / "more") == 0
    assert "base_dtype" not in lora_of(tmp_path / "more")
    to_peft = ["orbax-to-peft", tmp_path / "more", "--base", plain, "--out", tmp_path / "peft"]
    assert run_cli(*to_peft, "--quiet") == 0
    to_orbax = ["peft-to-orbax", tmp_path / "peft", "--base", plain, "--out", tmp_path / "again"]
    assert run_cli(*to_orbax, "--quiet") == 0
    onto(tmp_path, tmp_path / "again", plain, sample)
    assert any("float32 was assumed" in note for note in ledger(tmp_path)["notes"])
    (tmp_path / "out").rename(tmp_path / "assumed")
    found = onto(tmp_path, tmp_path / "again", plain, sample, "--base-dtype", "bfloat16")
    for name, array in by_hand(sample, values).items():
        assert found[name].tobytes() == array.tobytes(), name


def test_a_rule_that_says_nothing_quantises_nothing(
    tmp_path: Path, plain: Path, capsys: Any
) -> None:
    """Beside one that does: some modules were quantised in training, and others were not."""
    rules = [
        {"module_path": ".*attn.*", "rank": 4, "alpha": ALPHA, "weight_qtype": "int8"},
        {"module_path": ".*mlp.*", "rank": 4, "alpha": ALPHA},
    ]
    values = factors_of(trained("qlora_lora_only"))
    run = write_run(tmp_path / "run", values, lora(ALPHA, rules=rules))
    words = ["orbax-to-hf", run, "--base", plain, "--out", tmp_path / "out"]
    assert run_cli(*words, "--base-quantization", "int8", "--quiet") == 1
    assert "full precision" in capsys.readouterr().err
    # said of all, the rules need not say it again
    del rules[0]["weight_qtype"]
    run = write_run(tmp_path / "all", values, lora(ALPHA, rules=rules, weight_qtype="int8"))
    words[1] = run
    assert run_cli(*words, "--base-quantization", "int8", "--quiet") == 0


def test_validation_knows_the_dtype(tmp_path: Path, plain: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "run", widened(factors_of(trained("qlora_int8_full"))), lora(ALPHA))
    onto(tmp_path, run, plain, "qlora_int8_full", "--base-dtype", "bfloat16")
    words = ["validate", "merged", tmp_path / "out", "--base", plain, "--source", run]
    words += ["--base-quantization", "int8", "--quiet"]
    assert run_cli(*words, "--base-dtype", "bfloat16") == 0
    assert run_cli(*words) == 1
    assert "merged onto int8, no tiles, from bfloat16, not onto int8, no tiles, from float32" in (
        capsys.readouterr().err
    )


def test_a_dtype_that_contradicts(tmp_path: Path, plain: Path, capsys: Any) -> None:
    values = factors_of(trained("qlora_lora_only"))
    metadata = lora(ALPHA, base_dtype="bfloat16", **NF4)
    write_run(tmp_path / "run", widened(values), metadata)
    words = ["orbax-to-hf", tmp_path / "run", "--base", plain, "--out", tmp_path / "out"]
    words += ["--base-quantization", "nf4"]
    assert run_cli(*words, "--base-dtype", "float32") == 1
    error = capsys.readouterr().err
    assert "says that the base was bfloat16 in training, --base-dtype says float32; leave" in error
    assert run_cli(*words[:-2], "--base-dtype", "float32") == 2
    assert "--base-dtype wants --base-quantization nf4, int8 or int4" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run_cli(*words, "--base-dtype", "bfloat16", "--quiet") == 0
    (tmp_path / "out").rename(tmp_path / "given")
    assert run_cli(*words, "--quiet") == 0
    assert_same_bits(read_hf(tmp_path / "out"), read_hf(tmp_path / "given"))


def test_factors_of_several_dtypes(tmp_path: Path, plain: Path, capsys: Any) -> None:
    """Nobody knows the one dtype of their base; the sum of such adapters does not either."""
    values = factors_of(trained("qlora_lora_only"))
    names = sorted(values)
    mixed = {n: a.astype(F32) if n in names[:3] else a for n, a in values.items()}
    write_run(tmp_path / "mixed", mixed, lora(ALPHA))
    write_run(tmp_path / "narrow", {n: a * 2 for n, a in values.items()}, lora(ALPHA))
    words = [tmp_path / "mixed", tmp_path / "narrow", "--out", tmp_path / "sum"]
    assert surgery("combine-lora", *words) == 0
    assert sorted(lora_of(tmp_path / "sum")["base_dtype"]) == ["bfloat16", "float32"]
    for name in ("mixed", "sum"):
        words = ["orbax-to-hf", tmp_path / name, "--base", plain, "--out", tmp_path / "out"]
        words += ["--base-quantization", "int8", "--quiet"]
        assert run_cli(*words) == 1
        error = capsys.readouterr().err
        assert "the dtype of the base in training is not known" in error
        assert "pass it with --base-dtype" in error
        assert run_cli(*words, "--base-dtype", "bfloat16") == 0
        assert ledger(tmp_path)["base"]["used"] == "int8, no tiles, from bfloat16"
        (tmp_path / "out").rename(tmp_path / f"out-{name}")
    assert run_cli(*words, "--base-dtype", "float16") == 1
    assert "the base was float32 or bfloat16 in training" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["int3", 7, ["bfloat16", "int3"]])
def test_a_stored_dtype_that_is_none(tmp_path: Path, plain: Path, dtype: Any, capsys: Any) -> None:
    values = factors_of(trained("qlora_lora_only"))
    run = write_run(tmp_path / "run", values, lora(ALPHA, base_dtype=dtype))
    words = ["orbax-to-hf", run, "--base", plain, "--out", tmp_path / "out", "--quiet"]
    assert run_cli(*words, "--base-quantization", "nf4") == 1
    assert "metadata says base_dtype '" in capsys.readouterr().err
    assert run_cli(*words) == 0


def test_a_dtype_that_is_none_stops_nothing_that_needs_none(
    tmp_path: Path, plain: Path, capsys: Any
) -> None:
    """It goes along as it is, until somebody asks for the base that training saw."""
    values = factors_of(trained("qlora_lora_only"))
    run = write_run(tmp_path / "run", values, lora(ALPHA, base_dtype="int3", **NF4))
    assert surgery("resize-lora", run, "--rank", 2, "--out", tmp_path / "small") == 0
    assert lora_of(tmp_path / "small")["base_dtype"] == "int3"
    for name in ("run", "small"):
        words = ["orbax-to-hf", tmp_path / name, "--base", plain, "--out", tmp_path / "out"]
        assert run_cli(*words, "--quiet", "--base-quantization", "nf4") == 1
        assert "metadata says base_dtype 'int3'" in capsys.readouterr().err
        assert run_cli(*words, "--quiet") == 0
        assert any("full precision" in note for note in ledger(tmp_path)["notes"])
        (tmp_path / "out").rename(tmp_path / f"out-{name}")


def test_a_computed_adapter_says_how_its_base_was_quantised(tmp_path: Path, plain: Path) -> None:
    """Qwix's rules of it make such a model again; a merge tells of it as of the run's."""
    import qwix

    values = factors_of(trained("qlora_lora_only"))
    run = write_run(tmp_path / "run", values, lora(ALPHA, **NF4))
    write_run(tmp_path / "other", {n: a * 2 for n, a in values.items()}, lora(ALPHA, **NF4))
    assert surgery("resize-lora", run, "--rank", 2, "--out", tmp_path / "small") == 0
    words = [run, tmp_path / "other", "--out", tmp_path / "sum"]
    assert surgery("combine-lora", *words) == 0
    for name in ("small", "sum"):
        rules = lora_of(tmp_path / name)["rules"]
        for rule in rules:
            made = qwix.LoraRule(**rule)
            assert (made.weight_qtype, made.tile_size) == ("nf4", 8)
        convert(tmp_path, tmp_path / name, plain)
        told = ledger(tmp_path)
        assert told["base"]["compared_with"] == "nf4, tile 8, from bfloat16"
        assert any("--base-quantization nf4 onto what training saw" in n for n in told["notes"])
        (tmp_path / "out").rename(tmp_path / f"out-{name}")


@pytest.mark.parametrize("how", ["orbax-to-peft", "resize-lora", "combine-lora"])
def test_a_peft_directory_tells_of_it(tmp_path: Path, plain: Path, how: str, capsys: Any) -> None:
    values = factors_of(trained("qlora_lora_only"))
    run = write_run(tmp_path / "run", values, lora(ALPHA, **NF4))
    write_run(tmp_path / "other", {n: a * 2 for n, a in values.items()}, lora(ALPHA, **NF4))
    words = {
        "orbax-to-peft": ["orbax-to-peft", run],
        "resize-lora": ["surgery", "resize-lora", run, "--rank", 2, "--format", "peft"],
        "combine-lora": ["surgery", how, run, tmp_path / "other", "--format", "peft"],
    }[how]
    assert run_cli(*words, "--base", plain, "--out", tmp_path / "peft", "--quiet") == 0
    told = json.loads((tmp_path / "peft" / "conversion.json").read_text())
    assert told["trained_on"] == {"rules": [NF4], "base_dtype": "bfloat16"}
    note = "training saw the base quantised to nf4, tile 8, from bfloat16, and PEFT applies"
    assert any(note in one for one in told["notes"])
    assert any("merge the Tunix adapter with --base-quantization" in n for n in told["notes"])
    capsys.readouterr()
    assert run_cli("inspect", tmp_path / "peft", "--json") == 0
    report = json.loads(capsys.readouterr().out)["adapter"]
    assert report["base_quantization"] == "nf4, tile 8, from bfloat16"
    merge = ["surgery", "merge-lora", plain, tmp_path / "peft", "--out", tmp_path / "out"]
    assert run_cli(*merge, "--quiet") == 0
    note = "training quantised the base to nf4, tile 8; this merges onto full precision"
    assert any(note in one for one in ledger(tmp_path)["notes"])


def test_a_peft_directory_trained_on_since_says_nothing(tmp_path: Path, plain: Path) -> None:
    values = factors_of(trained("qlora_lora_only"))
    run = write_run(tmp_path / "run", values, lora(ALPHA, **NF4))
    words = ["orbax-to-peft", run, "--base", plain, "--out", tmp_path / "peft", "--quiet"]
    assert run_cli(*words) == 0
    assert "trained_on" in open_checkpoint(tmp_path / "peft").metadata
    file = tmp_path / "peft" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "trained_on" not in open_checkpoint(tmp_path / "peft").metadata


def test_an_edited_config_leaves_what_is_known_of_the_base(tmp_path: Path, plain: Path) -> None:
    """Such as one that names the base: the factors are what they were."""
    values = factors_of(trained("qlora_lora_only"))
    run = write_run(tmp_path / "run", values, lora(ALPHA, **NF4))
    words = ["orbax-to-peft", run, "--base", plain, "--out", tmp_path / "peft", "--quiet"]
    assert run_cli(*words) == 0
    before = open_checkpoint(tmp_path / "peft").metadata
    file = tmp_path / "peft" / "adapter_config.json"
    edited = {**json.loads(file.read_text()), "base_model_name_or_path": "google/gemma-3-270m"}
    file.write_text(json.dumps(edited))
    after = open_checkpoint(tmp_path / "peft").metadata
    assert after["adapter_config"] == edited
    assert (after["trained_on"], after["same_as"]) == (before["trained_on"], before["same_as"])


@pytest.mark.parametrize("sample", SCHEMES)
def test_codes_beside_the_factors_tell_it(tmp_path: Path, plain: Path, sample: str) -> None:
    run = write_run(tmp_path / "run", trained(sample), lora(ALPHA))
    words = ["orbax-to-peft", run, "--base", plain, "--out", tmp_path / "peft", "--quiet"]
    assert run_cli(*words) == 0
    told = json.loads((tmp_path / "peft" / "conversion.json").read_text())
    rule = {
        "qlora_int8_full": {"weight_qtype": "int8"},
        "qlora_int4_full": {"weight_qtype": "int4", "tile_size": 8},
    }[sample]
    assert told["trained_on"] == {"rules": [rule], "base_dtype": "bfloat16"}


def test_a_sum_has_one_base(tmp_path: Path, plain: Path, capsys: Any) -> None:
    values = factors_of(trained("qlora_lora_only"))
    metadata = {
        "one": lora(ALPHA, **NF4),
        "two": lora(ALPHA, weight_qtype="int8"),
        "three": lora(ALPHA, weight_calibration_method="absmax", **NF4),
        "silent": lora(ALPHA),
    }
    for factor, (name, said) in enumerate(metadata.items(), 1):
        write_run(tmp_path / name, {n: a * factor for n, a in values.items()}, said)
    out = ["--out", tmp_path / "sum"]
    assert surgery("combine-lora", tmp_path / "one", tmp_path / "two", *out) == 1
    error = capsys.readouterr().err
    assert "one" in error
    assert "a base quantised to nf4, tile 8, " in error
    assert "on one quantised to int8, no tiles: their sum has no one base; merge them" in error
    words = [tmp_path / name for name in ("silent", "one", "three")]
    assert surgery("combine-lora", *words, *out) == 0
    told = json.loads((tmp_path / "sum" / "conversion.json").read_text())
    assert told["trained_on"] == {"rules": [NF4], "base_dtype": "bfloat16"}
    assert any("silent" in n and "no word of how training quantised" in n for n in told["notes"])


def test_adapters_of_several_bases_merge_onto_full_precision(tmp_path: Path, plain: Path) -> None:
    values = factors_of(trained("qlora_lora_only"))
    write_run(tmp_path / "one", values, lora(ALPHA, **NF4))
    other = {n: a * np.asarray(2, a.dtype) for n, a in values.items()}
    write_run(tmp_path / "two", other, lora(ALPHA, weight_qtype="int8"))
    words = ["surgery", "merge-lora", plain, tmp_path / "one", tmp_path / "two"]
    assert run_cli(*words, "--out", tmp_path / "out", "--quiet") == 0
    note = "quantised the base to nf4, tile 8 and to int8, no tiles; this merges onto full"
    assert any(note in one for one in ledger(tmp_path)["notes"])


def test_rules_of_one_scheme_in_other_words_are_one(tmp_path: Path, plain: Path) -> None:
    rule = {"module_path": ".*", "rank": 4, "alpha": ALPHA, **NF4}
    rules = [rule, {**rule, "weight_calibration_method": "absmax"}]
    values = factors_of(trained("qlora_lora_only"))
    run = write_run(tmp_path / "run", values, lora(ALPHA, rules=rules))
    assert surgery("resize-lora", run, "--rank", 2, "--out", tmp_path / "small") == 0
    (made,) = lora_of(tmp_path / "small")["rules"]
    assert (made["weight_qtype"], made["tile_size"]) == ("nf4", 8)
    words = ["orbax-to-peft", run, "--base", plain, "--out", tmp_path / "peft", "--quiet"]
    assert run_cli(*words) == 0
    notes = json.loads((tmp_path / "peft" / "conversion.json").read_text())["notes"]
    assert any("quantised to nf4, tile 8, from bfloat16, and PEFT" in note for note in notes)


def test_modules_quantised_in_different_ways(tmp_path: Path, plain: Path, capsys: Any) -> None:
    """Read and told of, not written: which module had which rule is not carried."""
    rule = {"module_path": ".*", "rank": 4, "alpha": ALPHA}
    rules = [{**rule, **NF4}, {**rule, "weight_qtype": "int8"}]
    values = factors_of(trained("qlora_lora_only"))
    run = write_run(tmp_path / "run", values, lora(ALPHA, rules=rules))
    assert surgery("resize-lora", run, "--rank", 2, "--out", tmp_path / "small") == 1
    error = capsys.readouterr().err
    assert "by several rules (nf4, tile 8 and int8, no tiles, from bfloat16)" in error
    words = ["orbax-to-peft", run, "--base", plain, "--out", tmp_path / "peft", "--quiet"]
    assert run_cli(*words) == 0
    told = json.loads((tmp_path / "peft" / "conversion.json").read_text())
    assert len(told["trained_on"]["rules"]) == 2
