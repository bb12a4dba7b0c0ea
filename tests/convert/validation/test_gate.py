"""``orbax-to-hf --validate``: what fails does not take its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.tensor import Array, Box
from gemma_convert.surgery.delta import LowRank
from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    base_arrays,
    factor_arrays,
    run_cli,
    snapshot,
    tunix_arrays,
    write_base,
    write_run,
)


@pytest.fixture
def words(tmp_path: Path) -> list[Any]:
    """The command that merges into ``out``."""
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    return ["orbax-to-hf", run, "--base", base, "--out", tmp_path / "out", "--alpha", ALPHA]


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that applies the adapter twice."""
    read = LowRank.read

    def wrong(tensor: LowRank, box: Box) -> Array:
        return 2 * read(tensor, box)

    monkeypatch.setattr(LowRank, "read", wrong)


def test_what_passes_takes_its_name(
    words: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(*words, "--validate", "roundtrip,merged") == 0
    told = capsys.readouterr().err
    assert "roundtrip: passed" in told
    assert "merged: passed" in told
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run", "out"}
    assert not (tmp_path / "out" / "report.html").exists()


@pytest.mark.usefixtures("doubled")
def test_what_fails_is_left_as_rejected_with_a_report(
    words: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(*words, "--validate", "roundtrip,merged") == 1
    told = capsys.readouterr().err
    assert "roundtrip: passed" in told
    assert "merged: FAILED" in told
    assert f"error: {tmp_path / 'out'} was not made, it failed its validation: " in told
    assert "the adapter was applied twice" in told
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run", "out.rejected"}
    report = (tmp_path / "out.rejected" / "report.html").read_text()
    assert "the adapter was applied twice" in report
    assert (tmp_path / "out.rejected" / "model.safetensors").is_file()


@pytest.mark.usefixtures("doubled")
def test_an_earlier_rejected_one_and_what_stands_there_are_kept(
    words: list[Any], tmp_path: Path
) -> None:
    for name in ("out", "out.rejected"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    before = snapshot(tmp_path / "out"), snapshot(tmp_path / "out.rejected")
    assert run_cli(*words, "--validate", "merged", "--force") == 1
    assert (snapshot(tmp_path / "out"), snapshot(tmp_path / "out.rejected")) == before
    assert (tmp_path / "out.rejected-2" / "report.html").is_file()


@pytest.mark.usefixtures("doubled")
def test_without_the_gate_nobody_looks(words: list[Any], tmp_path: Path) -> None:
    assert run_cli(*words) == 0
    assert (tmp_path / "out").is_dir()


def test_bad_usage(words: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*words, "--validate", "vibes") == 2
    assert "'vibes' is none of roundtrip, merged, logits" in capsys.readouterr().err
    weights = write_run(tmp_path / "weights", tunix_arrays(GEMMA3))
    plain = ["orbax-to-hf", weights, *words[2:6]]
    assert run_cli(*plain, "--validate", "merged") == 2
    assert "--validate merged: the checkpoint holds no LoRA factors" in capsys.readouterr().err
    assert run_cli(*plain, "--validate", "roundtrip") == 0


def test_a_dry_run_validates_nothing(words: list[Any], tmp_path: Path) -> None:
    assert run_cli(*words, "--validate", "merged", "--dry-run") == 0
    assert not (tmp_path / "out").exists()
