"""``--base-quantization``: what is merged onto what, what the ledger tells, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapters.qwix import split_factors
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
    write_base,
    write_run,
)
from tests.test_orbax_samples import ALPHA, CONFIG, SAMPLES, convert, factors_of, rounded, trained

NF4 = {"lora": {"alpha": ALPHA, "weight_qtype": "nf4", "tile_size": 8}}
SCHEMES = {"qlora_int8_full": ["int8"], "qlora_int4_full": ["int4", "--tile", 8]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base from which the samples were quantised, as a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("plain")
    write_base(directory / "config", CONFIG, {})
    convert(directory, SAMPLES / "full_base", directory / "config")
    return directory / "out"


def write_config(directory: Path) -> Path:
    return write_base(directory / "config", CONFIG, {})


def by_hand(sample: str, values: dict[str, Array]) -> dict[str, Array]:
    """The sample's quantised base, dequantised, with ``values``' factors, float64 rounded once."""
    weights = arrays(split_factors(open_orbax(SAMPLES / sample))[0])
    base: dict[str, Array] = {}
    for name, array in weights.items():
        module = name.split(".", 2)[-1]
        for hf_module, share in lora_oracle.HF_MODULES.get(module, {}).items():
            base[f"model.layers.{name.split('.')[1]}.{hf_module}.weight"] = share(array)
    return rounded(lora_oracle.merged(base, "model.", factors_of(values), ALPHA))


def ledger(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "out" / "conversion.json").read_text())
    return found


@pytest.mark.parametrize("sample", SCHEMES)
def test_a_tree_of_codes(tmp_path: Path, plain: Path, sample: str) -> None:
    values = trained(sample)
    write_run(tmp_path / "run", values)
    found = convert(tmp_path, tmp_path / "run", write_config(tmp_path), "--alpha", ALPHA)
    expected = by_hand(sample, values)
    assert len(expected) == 14
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
    assert ledger(tmp_path)["base"] == {"used": ", ".join(_told(sample))}


@pytest.mark.parametrize("sample", SCHEMES)
def test_a_tree_of_codes_beside_its_base(tmp_path: Path, plain: Path, sample: str) -> None:
    """The tree is merged onto, the base compared with it, to the numbers of the other way."""
    values = trained(sample)
    write_run(tmp_path / "run", values)
    onto_codes = convert(tmp_path, tmp_path / "run", plain, "--alpha", ALPHA)
    told = ledger(tmp_path)["base"]
    assert (told["used"], told["compared_with"]) == (", ".join(_told(sample)), "full precision")
    (tmp_path / "out").rename(tmp_path / "codes")
    options = ["--alpha", ALPHA, "--base-quantization", "none"]
    onto_full = convert(tmp_path, tmp_path / "run", plain, *options)
    other = ledger(tmp_path)["base"]
    assert other["by_tensor"] == told["by_tensor"]
    assert (other["largest"], other["mean"]) == (told["largest"], told["mean"])
    changed = {n for n in onto_full if onto_full[n].tobytes() != onto_codes[n].tobytes()}
    # Tunix's kernels of the MLP are zero before training, and so are their codes
    assert changed == {n for n, one in told["by_tensor"].items() if one["largest"] > 0}
    assert len(changed) == 8


def _told(sample: str) -> list[str]:
    return {"qlora_int8_full": ["int8", "no tiles"], "qlora_int4_full": ["int4", "tile 8"]}[sample]


@pytest.mark.parametrize("sample", SCHEMES)
def test_the_base_quantised_anew_is_the_tree_that_qwix_saved(
    tmp_path: Path, plain: Path, sample: str
) -> None:
    values = trained(sample)
    write_run(tmp_path / "run", factors_of(values))
    options = ["--alpha", ALPHA, "--base-quantization", *SCHEMES[sample]]
    found = convert(tmp_path, tmp_path / "run", plain, *options)
    for name, array in by_hand(sample, values).items():
        assert found[name].tobytes() == array.tobytes(), name
    told = ledger(tmp_path)["base"]
    used = ", ".join([*_told(sample), "from bfloat16"])
    assert (told["used"], told["compared_with"]) == (used, "full precision")
    full, codes = read_hf(plain), by_hand(sample, _zeroed(values))
    apart = {n: np.abs(full[n].astype(np.float64) - codes[n].astype(np.float64)) for n in codes}
    assert told["by_tensor"].keys() == apart.keys()
    for name, difference in apart.items():
        assert told["by_tensor"][name]["largest"] == difference.max()
        assert told["by_tensor"][name]["mean"] == pytest.approx(difference.mean())
    every = np.concatenate([difference.ravel() for difference in apart.values()])
    assert told["largest"] == every.max()
    assert told["mean"] == pytest.approx(every.mean())


def _zeroed(values: dict[str, Array]) -> dict[str, Array]:
    return {n: a * 0 if n.endswith("_lora_b") else a for n, a in values.items()}


@pytest.mark.parametrize("sample", SCHEMES)
def test_a_tree_of_codes_onto_full_precision(tmp_path: Path, plain: Path, sample: str) -> None:
    values = trained(sample)
    write_run(tmp_path / "run", values)
    options = ["--alpha", ALPHA, "--base-quantization", "none"]
    found = convert(tmp_path, tmp_path / "run", plain, *options)
    factors = factors_of(values)
    assert_same_bits(found, rounded(lora_oracle.merged(read_hf(plain), "model.", factors, ALPHA)))
    told = ledger(tmp_path)
    assert (told["base"]["used"], told["base"]["compared_with"]) == (
        "full precision",
        ", ".join(_told(sample)),
    )
    assert told["base"]["largest"] > 0
    reason = "merged onto the base's full-precision weights instead"
    assert told["dropped"]["embedder.input_embedding"] == reason


def test_metadata_that_tells_of_qlora(tmp_path: Path, plain: Path) -> None:
    """Onto full precision unless asked; compared with what training saw, and said."""
    factors = factors_of(trained("qlora_lora_only"))
    write_run(tmp_path / "run", factors, NF4)
    found = convert(tmp_path, tmp_path / "run", plain)
    assert_same_bits(found, rounded(lora_oracle.merged(read_hf(plain), "model.", factors, ALPHA)))
    told = ledger(tmp_path)
    assert (told["base"]["used"], told["base"]["compared_with"]) == (
        "full precision",
        "nf4, tile 8, from bfloat16",
    )
    assert any("--base-quantization nf4 onto what training saw" in n for n in told["notes"])
    (tmp_path / "out").rename(tmp_path / "full")
    stored = convert(tmp_path, tmp_path / "run", plain, "--base-quantization", "nf4")
    assert ledger(tmp_path)["base"]["used"] == "nf4, tile 8, from bfloat16"
    (tmp_path / "out").rename(tmp_path / "nf4")
    given = convert(tmp_path, tmp_path / "run", plain, "--base-quantization", "nf4", "--tile", 8)
    assert_same_bits(given, stored)
    assert any(stored[n].tobytes() != found[n].tobytes() for n in found)
    (tmp_path / "out").rename(tmp_path / "nf4-again")
    asked = convert(tmp_path, tmp_path / "run", plain, "--base-quantization", "none")
    assert_same_bits(asked, found)
    assert not any("what training saw" in note for note in ledger(tmp_path)["notes"])


RULE = {"module_path": ".*", "rank": 4, "alpha": ALPHA, "weight_qtype": "int4", "tile_size": 8}


@pytest.mark.parametrize(
    ("lora", "options", "message"),
    [
        (
            NF4["lora"],
            ["int8"],
            "says that training quantised to nf4, tile 8, the options say int8",
        ),
        (
            NF4["lora"],
            ["nf4", "--tile", 4],
            "quantised to nf4, tile 8, the options say nf4, tile 4",
        ),
        (
            {},
            ["int4", "--tile", 5],
            r"q_einsum.w: tiles of 5 do not divide axis 1 of \[4, 32, 16\]",
        ),
        ({"weight_qtype": "float8_e5m2"}, [], "weight_qtype 'float8_e5m2', tile_size None"),
        (
            {"weight_qtype": "int8", "weight_calibration_method": "minmax"},
            [],
            "'minmax', which are",
        ),
        ({"weight_qtype": "int8", "tile_size": "8"}, [], "tile_size '8', calibration 'absmax'"),
        ({"weight_qtype": "int8", "act_qtype": "int8"}, [], "'int8', act_qtype 'int8', tile_size"),
        (
            {"rules": [RULE, {**RULE, "tile_size": 16}]},
            [],
            "says that training quantised to int4, tile 16 and int4, tile 8; merge onto the full",
        ),
    ],
)
def test_refusals(
    tmp_path: Path, plain: Path, lora: Any, options: list[Any], message: str, capsys: Any
) -> None:
    metadata = {"lora": {"alpha": ALPHA, **lora}}
    write_run(tmp_path / "run", factors_of(trained("qlora_lora_only")), metadata)
    refused(tmp_path, plain, message, options, capsys)


def refused(tmp_path: Path, base: Path, message: str, options: list[Any], capsys: Any) -> None:
    import re

    words = ["orbax-to-hf", tmp_path / "run", "--base", base, "--out", tmp_path / "out"]
    asked = ["--base-quantization", *options] if options else []
    assert run_cli(*words, *asked) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sample", "weights", "option", "message"),
    [
        ("qlora_int8_full", True, "nf4", r"quantised weights of its own \(int8, no tiles\)"),
        ("qlora_int4_full", False, "none", "quantization none, but the base has no weights"),
        ("full_with_lora", False, "nf4", "its own weights beside the factors, and they are not"),
    ],
)
def test_refused_trees(
    tmp_path: Path, plain: Path, sample: str, weights: bool, option: str, message: str, capsys: Any
) -> None:
    write_run(tmp_path / "run", trained(sample), {"lora": {"alpha": ALPHA}})
    base = plain if weights else write_config(tmp_path)
    refused(tmp_path, base, message, [option], capsys)


def test_a_peft_adapter_is_not_of_qwix(tmp_path: Path, plain: Path, capsys: Any) -> None:
    write_run(tmp_path / "run", factors_of(trained("lora_only")), {"lora": {"alpha": ALPHA}})
    words = ["orbax-to-peft", tmp_path / "run", "--base", plain, "--out", tmp_path / "peft"]
    assert run_cli(*words, "--quiet") == 0
    words = ["surgery", "merge-lora", plain, tmp_path / "peft", "--out", tmp_path / "out"]
    assert run_cli(*words, "--base-quantization", "nf4") == 1
    assert "none of the adapters is one of Qwix" in capsys.readouterr().err


def test_a_tile_without_a_scheme_is_bad_usage(tmp_path: Path, plain: Path, capsys: Any) -> None:
    words = ["orbax-to-hf", tmp_path, "--base", plain, "--out", tmp_path / "out", "--tile", 8]
    for more in ([], ["--base-quantization", "none"]):
        assert run_cli(*words, *more) == 2
        assert "--tile wants --base-quantization" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["hf", "tunix", "deepmind", "maxtext"])
def test_any_layout_of_the_output(tmp_path: Path, layout: str) -> None:
    """float32 factors on a bfloat16 base: quantised in float32, stored in bfloat16, any way."""
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model.", BF16))
    factors = {n: a for n, a in factor_arrays(GEMMA3, F32).items() if "up_proj" not in n}
    write_run(tmp_path / "run", factors, {"lora": {"alpha": ALPHA}})
    options = ["--base-quantization", "int4", "--quiet", "--adapter", tmp_path / "run"]
    expected = _converted(tmp_path, "direct", tmp_path / "base", "hf", *options)
    through = _converted(tmp_path, layout, tmp_path / "base", layout, *options)
    if layout != "hf":
        config = write_base(tmp_path / "config", GEMMA3, {})
        through = _converted(tmp_path, "back", through, "hf", "--base", config, "--quiet")
    found, wanted = read_hf(through), read_hf(expected)
    for name in wanted:
        assert found[name].dtype == BF16
    matrices = {n for n in wanted if "_proj" in n}
    assert_same_bits({n: found[n] for n in matrices}, {n: wanted[n] for n in matrices})
    full = _converted(tmp_path, "full", tmp_path / "base", "hf", *options[2:])
    others = read_hf(full)
    changed = {n for n in wanted if wanted[n].tobytes() != others[n].tobytes()}
    assert changed == {n for n in matrices if "up_proj" not in n}


def _converted(directory: Path, name: str, source: Path, layout: str, *options: Any) -> Path:
    out = directory / f"out-{name}"
    assert run_cli("convert", source, "--to", layout, "--out", out, *options) == 0
    return out
