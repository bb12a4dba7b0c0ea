"""``orbax-to-hf --validate``: what fails does not take its name."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.hub.model_card import card_body
from gemma_convert.convert.hub.source import read_source
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.tensor import Array, Box
from gemma_convert.convert.validation import gate, ledger_check
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


def test_the_verdicts_are_kept_where_the_card_looks(words: list[Any], tmp_path: Path) -> None:
    """In the ledger too; and the output passes afterwards, with its verdicts in it."""
    assert run_cli(*words, "--validate", "roundtrip,merged", "--quiet") == 0
    out = tmp_path / "out"
    kept = json.loads((out / "validation.json").read_text())
    assert {one["check"]: one["passed"] for one in kept} == {"roundtrip": True, "merged": True}
    run = tmp_path / "run" / "0" / "model_params"
    assert kept[1]["title"] == f"{out} from {run} and {tmp_path / 'base'}"
    assert "weights computed again in float64" in kept[1]["summary"]["merged"]
    assert ".partial" not in (out / "validation.json").read_text()
    listed = json.loads((out / "conversion.json").read_text())["output"]["files"]
    digest = hashlib.sha256((out / "validation.json").read_bytes()).hexdigest()
    assert listed["validation.json"]["sha256"] == digest
    assert listed.keys() == {path.name for path in out.iterdir()} - {"conversion.json"}
    check = ["validate", "merged", out, "--base", tmp_path / "base", "--alpha", ALPHA]
    assert run_cli(*check, "--adapter", tmp_path / "run", "--quiet") == 0


def test_the_model_card_tells_them(words: list[Any], tmp_path: Path) -> None:
    """What the gate keeps, and what ``validate --json`` prints into the same file."""
    assert run_cli(*words, "--validate", "roundtrip,merged", "--quiet") == 0
    out = tmp_path / "out"
    card = card_body(read_source(out, "org/tuned").card)
    assert "## Validation" in card
    assert "### out from model_params and base" in card
    assert card.count("| verdict | passed |") == 2
    assert str(tmp_path) not in card


def test_what_validate_prints_is_what_the_card_tells(
    words: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(*words, "--quiet") == 0
    out = tmp_path / "out"
    capsys.readouterr()
    check = ["validate", "merged", out, "--base", tmp_path / "base", "--alpha", ALPHA, "--json"]
    assert run_cli(*check, "--adapter", tmp_path / "run") == 0
    (out / "validation.json").write_text(capsys.readouterr().out)
    card = card_body(read_source(out, "org/tuned").card)
    assert "### out from base and model_params\n\n| | |\n|---|---|\n| verdict | passed |" in card
    assert "| wrong | 0 weights |" in card
    assert run_cli(*check, "--adapter", tmp_path / "run") == 0  # the file is no stranger


def test_verdicts_on_a_base_do_not_travel_along(words: list[Any], tmp_path: Path) -> None:
    (tmp_path / "base" / "validation.json").write_text("[]")
    assert run_cli(*words, "--quiet") == 0
    assert not (tmp_path / "out" / "validation.json").exists()


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
def test_what_was_rejected_is_not_gone_on_with(
    words: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a lock nor a journal is left: the same command makes it all anew."""
    for _ in range(2):
        assert run_cli(*words, "--validate", "merged") == 1
        assert "going on where" not in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run", "out.rejected"}


@pytest.mark.usefixtures("doubled")
def test_the_newest_rejected_one_replaces_an_earlier_one_unless_somebody_touched_it(
    words: list[Any], tmp_path: Path
) -> None:
    rejected, second = tmp_path / "out.rejected", tmp_path / "out.rejected-2"
    assert run_cli(*words, "--validate", "merged") == 1
    first = (rejected / "model.safetensors").stat().st_ino
    held = (rejected / "model.safetensors").open("rb")  # so that its inode is nobody else's
    assert run_cli(*words, "--validate", "merged") == 1
    assert (rejected / "model.safetensors").stat().st_ino != first
    held.close()
    (rejected / "notes.txt").write_text("mine")
    before = snapshot(rejected)
    for _ in range(2):
        assert run_cli(*words, "--validate", "merged") == 1
    assert snapshot(rejected) == before
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run", rejected.name, second.name}


@pytest.mark.usefixtures("doubled")
@pytest.mark.parametrize("name", ["model.safetensors", "conversion.json", "report.html"])
def test_a_rejected_one_that_is_not_whole_is_kept(
    name: str, words: list[Any], tmp_path: Path
) -> None:
    rejected = tmp_path / "out.rejected"
    assert run_cli(*words, "--validate", "merged") == 1
    (rejected / name).write_text("{}")
    if name == "report.html":
        (rejected / name).unlink()
    before = snapshot(rejected)
    assert run_cli(*words, "--validate", "merged") == 1
    assert snapshot(rejected) == before
    assert (tmp_path / "out.rejected-2" / "report.html").is_file()


@pytest.mark.usefixtures("doubled")
def test_a_report_that_cannot_be_written_rejects_nothing_yet(
    words: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was written stays for the next run, which goes on with it and reports."""

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gate, "write_report", full)
        assert run_cli(*words, "--validate", "merged") == 1
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert "run the same command again" in told
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"base", "run", ".out.partial"}
    assert run_cli(*words, "--validate", "merged") == 1
    assert "going on where" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run", "out.rejected"}
    assert (tmp_path / "out.rejected" / "report.html").is_file()


def test_a_report_of_a_run_that_came_no_further_does_not_stay(
    words: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(directory: Path, *args: Any) -> None:
        (Path(directory) / "report.html").write_text("failed")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate, "validate_merged", lambda out, job: interrupt(out.source))
        assert run_cli(*words, "--validate", "merged") == 130
    assert run_cli(*words, "--validate", "merged") == 0
    assert not (tmp_path / "out" / "report.html").exists()


@pytest.mark.usefixtures("doubled")
def test_a_rejected_one_can_be_checked(words: list[Any], tmp_path: Path) -> None:
    """Its report is no stranger beside the files of its ledger."""
    assert run_cli(*words, "--validate", "merged") == 1
    (rejected,) = tmp_path.glob("*.rejected")
    ledger = read_object(rejected / "conversion.json")
    assert [str(f) for f in ledger_check._files(rejected, ledger)] == []


def test_an_interrupted_check_is_gone_on_with(
    words: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is written again, and the check is run."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate, "validate_merged", interrupt)
        assert run_cli(*words, "--validate", "merged") == 130
    assert not (tmp_path / "out").exists()
    shard = tmp_path / ".out.partial" / "output" / "model.safetensors"
    written = shard.stat().st_ino
    assert run_cli(*words, "--validate", "merged") == 0
    told = capsys.readouterr().err
    assert "going on where an interrupted run" in told
    assert "merged: passed" in told
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino == written
    assert not shard.parent.parent.exists()


def test_a_check_that_cannot_be_run_keeps_what_was_written(
    words: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*args: Any, **more: Any) -> None:
        raise OSError("no tokenizer")

    monkeypatch.setattr(gate, "compare_logits", broken)
    monkeypatch.setattr(gate.Gate, "require_runnable", lambda self: None)
    assert run_cli(*words, "--validate", "logits,merged") == 1
    told = capsys.readouterr().err
    assert "logits: could not be run: OSError: no tokenizer" in told
    assert "merged: passed" in told
    assert "no tokenizer" in (tmp_path / "out.rejected" / "report.html").read_text()
    assert (tmp_path / "out.rejected" / "model.safetensors").is_file()
    assert not (tmp_path / "out").exists()


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
    for nothing in ("", "roundtrip,"):
        assert run_cli(*plain, "--validate", nothing) == 2
        assert "'' is none of roundtrip, merged, logits" in capsys.readouterr().err


def test_adapters_beside_the_checkpoint_are_checked_too(words: list[Any], tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", factor_arrays(GEMMA3, seed=3))
    more = ["--adapter", other, "--weight", -0.5, "--validate", "roundtrip,merged"]
    assert run_cli(*words, *more) == 0
    kept = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert str(other) in kept[1]["title"]


@pytest.mark.parametrize("to", ["hf", "tunix", "maxtext"])
def test_every_converting_command_has_the_gate(
    to: str, words: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, base, out = words[1], words[3], tmp_path / to
    made = ["convert", run, "--base", base, "--alpha", ALPHA, "--to", to, "--out", out]
    assert run_cli(*made, "--validate", "roundtrip,merged") == 0
    assert json.loads((out / "validation.json").read_text())[1]["passed"]
    capsys.readouterr()
    again = ["surgery", "merge-lora", base, run, "--alpha", ALPHA, "--out", tmp_path / "merged"]
    assert run_cli(*again, "--validate", "roundtrip,merged") == 0
    assert "merged: passed" in capsys.readouterr().err


@pytest.mark.usefixtures("doubled")
def test_an_orbax_output_is_rejected_too(words: list[Any], tmp_path: Path) -> None:
    made = ["convert", *words[1:4], "--alpha", ALPHA, "--to", "tunix", "--out", tmp_path / "out"]
    assert run_cli(*made, "--validate", "merged") == 1
    assert not (tmp_path / "out").exists()
    assert "applied twice" in (tmp_path / "out.rejected" / "report.html").read_text()


def test_a_dry_run_validates_nothing(words: list[Any], tmp_path: Path) -> None:
    assert run_cli(*words, "--validate", "merged", "--dry-run") == 0
    assert not (tmp_path / "out").exists()
