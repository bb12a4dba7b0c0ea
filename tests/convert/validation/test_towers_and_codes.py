"""Validation of models with towers and of quantised weights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import LAYOUTS
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.validation.diff import diff
from gemma_convert.convert.validation.roundtrip import validate_roundtrip
from tests import tiny_towers
from tests.checkpoints import arrays, memory, run_cli, write_base, write_run
from tests.test_orbax_samples import ALPHA, CONFIG, SAMPLES, factors_of, trained
from tests.test_qlora_command import SCHEMES

VIAS = {"gemma3": ("tunix", "deepmind", "maxtext"), "gemma4-e2b": ("tunix-head", "deepmind")}
"""Layouts that have the towers of these models."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models with towers as transformers saves them, by case."""

    @cache
    def opened(case: str) -> Checkpoint:
        return open_checkpoint(tiny_towers.save(case, tmp_path_factory.mktemp(case) / "hf"))

    return opened


def is_tower(name: str) -> bool:
    return any(word in name for word in ("vision", "audio", "multi_modal"))


@pytest.mark.parametrize("case", VIAS)
def test_towers_go_through_the_layouts_that_have_them(saved: Any, case: str) -> None:
    source = saved(case)
    result = validate_roundtrip(source, VIAS[case])
    assert result.passed, result.findings
    for via in VIAS[case]:
        rows = {row["name"] for row in result.data["tensors"] if row["via"] == via}
        assert rows == set(source)
        assert sum(map(is_tower, rows)) > 20


def test_a_tower_that_a_layout_has_no_names_for_did_not_go_there(saved: Any) -> None:
    """It comes back from the source itself, which proves nothing."""
    source = saved("gemma4-e2b")
    result = validate_roundtrip(source, ["maxtext-unscanned"])
    assert result.passed, result.findings
    rows = {row["name"] for row in result.data["tensors"]}
    assert rows == {name for name in source if not is_tower(name) and "embed_audio" not in name}
    left = len(source) - len(rows)
    (note,) = (n for n in result.notes if "are not in maxtext-unscanned" in n)
    assert note.startswith(f"{left} tensors")
    assert "tower of this model" in note


@pytest.mark.parametrize("case", VIAS)
def test_a_tower_is_compared_by_the_names_of_the_other_layout(saved: Any, case: str) -> None:
    source = saved(case)
    made = convert(source, LAYOUTS[VIAS[case][0]]).plan.target
    tree = memory(arrays(made), source="tree", format="orbax")
    same = diff(source, tree, probes=0)
    told = {row["name"]: row["status"] for row in same.data["tensors"]}
    # Tunix' models have the keys and values that shared layers never read, transformers' have not.
    more = {name for name in told if name not in source}
    assert all(told[name] == "only in B" and ".self_attn." in name for name in more)
    assert all(told[name] == "same" for name in source)
    assert bool(more) == (case == "gemma4-e2b")
    name = next(n for n in tree if "vision" in n and len(tree[n].shape) > 1)
    spoilt = {**arrays(tree), name: arrays(tree)[name][::-1].copy()}
    found = diff(source, memory(spoilt, source="tree", format="orbax"), probes=0)
    differ = [row["name"] for row in found.data["tensors"] if row["status"] == "differs"]
    assert len(differ) >= 1
    assert all("vision" in name or "multi_modal" in name for name in differ)


def test_towers_under_other_prefixes(saved: Any) -> None:
    """What the two generations of transformers put before a tower's names."""
    source = saved("gemma3")
    renamed = {
        (
            name.replace("language_model.model.", "model.language_model.")
            if name.startswith("language_model.")
            else f"model.{name}"
        ): array
        for name, array in arrays(source).items()
    }
    other = memory(renamed, config=source.config, source="other")
    assert not set(source) & set(other)
    assert not diff(source, other, probes=0).findings


def test_quantised_weights_go_as_the_numbers_they_stand_for() -> None:
    source = open_checkpoint(SAMPLES / "qlora_int4_full")
    config = Checkpoint({}, config=CONFIG, source="config")
    result = validate_roundtrip(source, ["hf", "deepmind"], base=config)
    assert result.passed, result.findings
    assert any("12 quantised weights" in note for note in result.notes), result.notes


@pytest.fixture(params=SCHEMES)
def qlora(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[Any]]:
    """A run of QLoRA on the disk with all its weights, and the options that name its scheme."""
    write_base(tmp_path / "config", CONFIG, {})
    write_run(tmp_path / "run", trained(request.param))
    write_run(tmp_path / "factors", factors_of(trained(request.param)))
    words = ["orbax-to-hf", SAMPLES / "full_base", "--base", tmp_path / "config"]
    assert run_cli(*words, "--out", tmp_path / "plain", "--quiet") == 0
    return tmp_path, ["--base-quantization", *SCHEMES[request.param]]


def merge(directory: Path, run: str, base: str, *options: Any) -> int:
    words = ["orbax-to-hf", directory / run, "--base", directory / base, "--alpha", ALPHA]
    return run_cli(*words, "--out", directory / "out", "--quiet", *options)


def check(directory: Path, *options: Any) -> int:
    return run_cli("validate", "merged", directory / "out", "--alpha", ALPHA, "--all", *options)


def test_a_merge_onto_codes(qlora: Any, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = qlora
    assert merge(directory, "run", "config", "--validate", "roundtrip,merged") == 0
    capsys.readouterr()
    words = ["--source", directory / "run", "--base", directory / "config"]
    assert check(directory, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["tensors"]) == 14
    assert "is not computed again" in told["notes"][-1]


def test_a_merge_onto_the_base_quantised_anew(
    qlora: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, scheme = qlora
    assert merge(directory, "factors", "plain", *scheme) == 0
    words = ["--base", directory / "plain", "--adapter", directory / "factors"]
    assert check(directory, *words, *scheme) == 0
    capsys.readouterr()
    assert check(directory, *words) == 1  # onto full precision it would all be wrong
    told = capsys.readouterr().err
    assert "conversion.json: merged onto int" in told
    assert "not onto the base as it is; give the --base-quantization" in told


def test_a_weight_that_is_not_of_the_codes_is_listed(
    qlora: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import load_file, save_file

    directory, _ = qlora
    assert merge(directory, "run", "config") == 0
    path = directory / "out" / "model.safetensors"
    values = load_file(path)
    name = "model.layers.1.self_attn.o_proj.weight"
    values[name] = np.ascontiguousarray(values[name][::-1])
    save_file(values, path, metadata={"format": "pt"})
    capsys.readouterr()
    assert check(directory, "--source", directory / "run", "--base", directory / "config") == 1
    told = capsys.readouterr().out
    assert f"{name}: " in told
    assert "weights are not the rounded sum" in told
