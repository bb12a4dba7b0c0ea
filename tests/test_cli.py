"""The command line: exit codes, what goes to stdout and to stderr, dry runs, usage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert import __version__, cli, console
from gemma_convert.cli import COMMANDS
from tests import lora_oracle
from tests.checkpoints import (
    ALPHA,
    BF16,
    F32,
    GEMMA3,
    GEMMA4,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    snapshot,
    write_base,
    write_run,
)

PREFIX = "model.language_model."
MERGED = 7 + 7 + 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    write_base(directory / "base", GEMMA4, base_arrays(GEMMA4, PREFIX), shards=2)
    write_run(directory / "run", factor_arrays(GEMMA4), {"lora": {"alpha": ALPHA}})
    return directory


@pytest.fixture
def words(inputs: Path, tmp_path: Path) -> list[Any]:
    """orbax-to-hf with what it needs."""
    out = tmp_path / "out"
    return ["orbax-to-hf", inputs / "run", "--base", inputs / "base", "--out", out]


def test_the_main_job(words: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for text in ("gemma4, 3 layers", f"{MERGED} tensors", "18 found, 18 applied, 18 changed"):
        assert text in captured.out
    base, factors = base_arrays(GEMMA4, PREFIX), factor_arrays(GEMMA4)
    expected = lora_oracle.merged(base, PREFIX, factors, ALPHA)
    found = read_hf(words[-1])
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        if array.dtype == np.float64:
            array = lora_oracle.rounded_to_bfloat16(array)
        assert found[name].tobytes() == array.tobytes(), name


def test_json_alone_is_on_stdout(words: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*words, "--json") == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger == json.loads((words[-1] / "conversion.json").read_text())


def test_quiet_prints_nothing(
    words: list[Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Down to the file descriptors: libraries included, and progress that is due at once."""
    monkeypatch.setattr(console, "_PLAIN_SECONDS", -1.0)
    assert run_cli(*words, "--quiet") == 0
    back = ["hf-to-orbax", words[-1], "--layout", "tunix", "--out", words[-1].parent / "back"]
    assert run_cli(*back, "--quiet") == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("as_json", [False, True])
def test_dry_run_shows_the_plan_and_writes_nothing(
    words: list[Any], inputs: Path, tmp_path: Path, as_json: bool, capsys: Any
) -> None:
    before = snapshot(tmp_path), snapshot(inputs)
    assert run_cli(*words, "--dry-run", *(["--json"] if as_json else [])) == 0
    captured = capsys.readouterr()
    assert (snapshot(tmp_path), snapshot(inputs)) == before
    if not as_json:
        for text in ("Plan: nothing was written", f"{MERGED} tensors", "18 pairs, scale 2.5"):
            assert text in captured.out
        return
    plan = json.loads(captured.out)
    base = base_arrays(GEMMA4, PREFIX)
    assert plan["pairs"] == 18
    assert plan["bytes"] == sum(array.nbytes for array in base.values())
    assert plan["counts"] == {"copied": len(base) - MERGED, "merged": MERGED, "dropped": 0}
    assert plan["inputs"] == [str(inputs / "run" / "0" / "model_params"), str(inputs / "base")]
    assert {name: tensor["shape"] for name, tensor in plan["tensors"].items()} == {
        name: list(array.shape) for name, array in base.items()
    }


def test_dry_run_refuses_what_the_run_would_refuse(
    words: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words[-1].mkdir()
    (words[-1] / "file").touch()
    assert run_cli(*words, "--dry-run") == 1
    assert "is not empty" in capsys.readouterr().err


def test_force_replaces(words: list[Any]) -> None:
    words[-1].mkdir()
    (words[-1] / "model-00001-of-00009.safetensors").touch()
    assert run_cli(*words, "--force", "--quiet") == 0
    assert sorted(path.name for path in words[-1].iterdir()) == [
        "config.json",
        "conversion.json",
        "model.safetensors",
    ]
    assert [path.name for path in words[-1].parent.iterdir()] == ["out"]


@pytest.mark.parametrize(("dtype", "numpy"), [("float32", F32), ("float16", np.float16)])
def test_dtype(words: list[Any], dtype: str, numpy: Any) -> None:
    assert run_cli(*words, "--dtype", dtype, "--quiet") == 0
    assert {array.dtype for array in read_hf(words[-1]).values()} == {np.dtype(numpy)}
    config = json.loads((words[-1] / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == (dtype, dtype)


def test_hf_to_orbax_and_back(inputs: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    words = ["hf-to-orbax", inputs / "base", "--layout", "tunix", "--out", there, "--quiet"]
    assert run_cli(*words) == 0
    words = ["orbax-to-hf", there, "--base", inputs / "base", "--out", back, "--quiet"]
    assert run_cli(*words) == 0
    base = base_arrays(GEMMA4, PREFIX)
    found = read_hf(back)
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in base.items()}
    assert {array.dtype for array in found.values()} == {BF16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["orbax-to-hf"], "Missing argument 'CHECKPOINT'"),
        (["orbax-to-hf", "run", "--out", "o"], "Missing option '--base'"),
        (["orbax-to-hf", "run", "--base", "b"], "Missing option '--out'"),
        (["orbax-to-hf", "r", "--base", "b", "--out", "o", "--alpha", "x"], "not a valid float"),
        (["orbax-to-hf", "r", "--base", "b", "--out", "o", "--dtype", "int8"], "is not one of"),
        (["orbax-to-hf", "r", "--base", "b", "--out", "o", "--frobnicate"], "No such option"),
        (
            ["orbax-to-hf", "r", "--base", "b", "--out", "o", "--max-shard-size", "5XB"],
            "such as 5GB",
        ),
        (["orbax-to-hf", "r", "--base", "b", "--out", "o", "--max-shard-size", "0"], "such as 5GB"),
        (["hf-to-orbax", "d", "--out", "o"], "Missing option '--layout'"),
        (
            ["hf-to-orbax", "d", "--out", "o", "--layout", "x"],
            "is not one of 'tunix', 'tunix-head'",
        ),
        (["inspect"], "Missing argument 'PATH'"),
        (["inspect", "x", "--step", "last"], "not a valid integer"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["--frobnicate"], "No such option"),
        ([], "Usage: gemma-convert"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(command, "--help") == 0
    text = capsys.readouterr().out
    assert "Example:" in text
    assert f"gemma-convert {command} " in text


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--help") == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command}  " in text for command in COMMANDS)
    assert run_cli("--version") == 0
    assert capsys.readouterr().out.split() == ["gemma-convert,", "version", __version__]


def test_an_error_is_one_line_and_debug_shows_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("inspect", "/no/such/path") == 1
    line = "error: /no/such/path does not exist; check the path; a Hub id is ORG/NAME\n"
    assert capsys.readouterr() == ("", line)
    assert run_cli("inspect", "/no/such/path", "--debug") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("Traceback (most recent call last)")
    assert captured.err.endswith(line)
    assert captured.out == ""


def test_a_bug_says_that_it_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr("gemma_convert.convert.readers.open_headers", broken)
    assert run_cli("inspect", tmp_path) == 1
    line = "error: ValueError: two lines (a bug here; run again with --debug and report it)\n"
    assert capsys.readouterr().err == line


def test_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gemma_convert.convert.readers.open_headers", interrupt)
    assert run_cli("inspect", tmp_path) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_as_a_module_the_exit_code_reaches_the_shell() -> None:
    for arguments, code in ((["--version"], 0), (["inspect", "/no/such/path"], 1), (["nope"], 2)):
        command = [sys.executable, "-m", "gemma_convert", *arguments]
        assert subprocess.run(command, capture_output=True, check=False).returncode == code


def test_an_error_of_the_system_is_told_with_its_path(tmp_path: Path, capsys: Any) -> None:
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    out = tmp_path / ("x" * 300)
    assert run_cli("hf-to-orbax", base, "--layout", "tunix", "--out", out) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path}/")
    assert err.endswith("File name too long; see to the path and its permissions\n")
