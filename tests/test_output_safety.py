"""Outputs in awkward places: through links and ``..``, over a file, into what appears meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.writers.staging import staging
from tests.checkpoints import (
    GEMMA3,
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

OVERLAP = "are the same directory or one holds the other; choose another --out"


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A base in two shards with a tokenizer, and a run of LoRA factors."""
    files = {"tokenizer.json": "{}"}
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."), shards=2, files=files)
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    return tmp_path


def merge(run: Any, base: Any, out: Any, *options: Any) -> int:
    return run_cli("orbax-to-hf", run, "--base", base, "--out", out, "--alpha", 5, *options)


def told(capsys: pytest.CaptureFixture[str], message: str) -> None:
    captured = capsys.readouterr()
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", captured.err), captured.err
    assert captured.out == ""


def into_cache(base: Path, cache: Path) -> Path:
    """``base`` as the Hugging Face cache keeps it: a snapshot of links into blobs."""
    (cache / "blobs").mkdir(parents=True)
    links = cache / "snapshots" / "abc"
    links.mkdir(parents=True)
    for number, path in enumerate(sorted(base.iterdir())):
        path.rename(cache / "blobs" / f"{number:040x}")
        (links / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    base.rmdir()
    return links


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_the_blobs_behind_a_cached_base(
    inputs: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The snapshot directory holds links only; what they point to is read and must stay."""
    base = into_cache(inputs / "base", inputs / "cache")
    before = snapshot(inputs)
    out = inputs / "cache" / "blobs"
    assert merge(inputs / "run", base, out, "--force", *options) == 1
    told(capsys, OVERLAP)
    assert snapshot(inputs) == before


def test_the_blobs_on_the_way_back(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = into_cache(inputs / "base", inputs / "cache")
    before = snapshot(inputs)
    out = inputs / "cache" / "blobs"
    assert run_cli("hf-to-orbax", base, "--layout", "tunix", "--out", out, "--force") == 1
    told(capsys, OVERLAP)
    assert snapshot(inputs) == before


@pytest.mark.parametrize("name", ["config.json", "README.md"])
def test_a_single_linked_file(inputs: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the base's directory shows, be it made anew or left out, is the user's."""
    (inputs / "base" / "README.md").write_text("card")
    (inputs / "shared").mkdir()
    (inputs / "base" / name).rename(inputs / "shared" / name)
    (inputs / "base" / name).symlink_to(inputs / "shared" / name)
    before = snapshot(inputs)
    assert merge(inputs / "run", inputs / "base", inputs / "shared", "--force") == 1
    told(capsys, OVERLAP)
    assert snapshot(inputs) == before


def test_a_base_of_links_without_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = into_cache(write_base(tmp_path / "base", GEMMA3, {}), tmp_path / "cache")
    run = write_run(tmp_path / "run", tunix_arrays(GEMMA3))
    before = snapshot(tmp_path)
    out = tmp_path / "cache" / "blobs"
    assert run_cli("orbax-to-hf", run, "--base", base, "--out", out, "--force") == 1
    told(capsys, OVERLAP)
    assert snapshot(tmp_path) == before


def test_paths_that_go_up(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a sub-directory, every command finds ``..`` and makes what it makes elsewhere."""
    assert merge(inputs / "run", inputs / "base", inputs / "merged", "--quiet") == 0
    (inputs / "sub").mkdir()
    monkeypatch.chdir(inputs / "sub")
    for path in ("../run", "../base"):
        assert run_cli("inspect", path) == 0
    assert merge("../run", "../base", "../out", "--quiet") == 0
    assert_same_bits(read_hf(inputs / "out"), read_hf(inputs / "merged"))
    words = ["hf-to-orbax", "../out", "--layout", "tunix", "--out", "../back", "--quiet"]
    assert run_cli(*words) == 0
    words = ["orbax-to-hf", "../back", "--base", "../base", "--out", "../again", "--quiet"]
    assert run_cli(*words) == 0
    assert_same_bits(read_hf(inputs / "again"), read_hf(inputs / "merged"))
    assert snapshot(inputs / "sub") == {}
    names = ["again", "back", "base", "merged", "out", "run", "sub"]
    assert sorted(path.name for path in inputs.iterdir()) == names
    assert capsys.readouterr().err == ""


def test_up_behind_a_link_is_where_the_system_goes(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``link/../base`` is the neighbour of the link's target, not the base beside the link."""
    (inputs / "elsewhere" / "deep").mkdir(parents=True)
    (inputs / "link").symlink_to("elsewhere/deep")
    monkeypatch.chdir(inputs)
    before = snapshot(inputs / "base")
    assert merge("run", "base", "link/../base", "--force", "--quiet") == 0
    assert snapshot(inputs / "base") == before
    assert (inputs / "elsewhere" / "base" / "conversion.json").is_file()


@pytest.mark.parametrize("made", ["directory", "file"])
def test_an_output_made_by_someone_else_meanwhile(tmp_path: Path, made: str) -> None:
    out = tmp_path / "out"
    theirs = out / "theirs" if made == "directory" else out
    message = "output .*out was made by something else while this ran; choose another --out, or"

    def intrude(directory: Path) -> None:
        (directory / "file").write_text("ours")
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_text("theirs")

    with (
        pytest.raises(OutputError, match=message),
        staging(out, {}, seal="file") as (directory, _),
    ):
        intrude(directory)
    found = {name: data for name, data in snapshot(tmp_path).items() if data is not None}
    assert found == {str(theirs.relative_to(tmp_path)): b"theirs"}
    assert list(tmp_path.iterdir()) == [out]


def test_an_output_made_meanwhile_is_replaced_with_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging(out, {}, seal="file", force=True) as (directory, _):
        (directory / "file").write_text("ours")
        out.mkdir()
        (out / "theirs").touch()
    assert snapshot(tmp_path) == {"out": None, "out/file": b"ours"}


@pytest.mark.parametrize("options", [[], ["--force"]])
def test_the_current_directory(
    inputs: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (inputs / "empty").mkdir()
    monkeypatch.chdir(inputs / "empty")
    before = snapshot(inputs)
    for out in (".", "../empty"):
        assert merge("../run", "../base", out, *options) == 1
        told(
            capsys, f"output {re.escape(out)} is the current directory or holds it; name a new one"
        )
    assert snapshot(inputs) == before


@pytest.mark.parametrize("below", ["x", "x/y"])
def test_an_output_below_a_file(
    inputs: Path, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (inputs / "afile").write_text("mine")
    before = snapshot(inputs)
    assert merge(inputs / "run", inputs / "base", inputs / "afile" / below, "--force") == 1
    told(capsys, f"output .*afile/{below}: .*/afile is a file; choose another --out")
    assert snapshot(inputs) == before


SLOW = """
import os, sys, threading
from gemma_convert.cli import program
from gemma_convert.convert.readers.safetensors_tensor import SafetensorsTensor
def slow(tensor, box):
    os.write(1, b"reading\\n")  # at once: lines of two threads must not run together
    threading.Event().wait()
SafetensorsTensor.read = slow
sys.exit(program())
"""


@pytest.mark.parametrize("command", ["orbax-to-hf", "hf-to-orbax"])
def test_a_termination_before_anything_is_finished_leaves_nothing(
    inputs: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No read ever ends, as on a file system whose server is gone."""
    before = snapshot(inputs)
    words = {
        "orbax-to-hf": ["run", "--base", "base", "--alpha", "5"],
        "hf-to-orbax": ["base", "--layout", "tunix"],
    }[command]
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, command, *words, "--out", "out", "--quiet"],
        cwd=inputs,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"  # all is imported
            out = inputs / "out"
            if command == "orbax-to-hf":
                assert merge(inputs / "run", inputs / "base", out) == 1
            else:
                words = ["hf-to-orbax", str(inputs / "base"), "--layout", "tunix"]
                assert run_cli(*words, "--out", out) == 1
            told(capsys, rf"another run is writing there \(process {process.pid}\); wait until it ")
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert err.splitlines()[-1:] == ["interrupted; nothing was finished, so nothing is kept"], err
    assert snapshot(inputs) == before
