"""Outputs that would cost something, and runs that break in the middle: nothing is lost or left."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.safetensors_tensor import SafetensorsTensor
from gemma_convert.convert.tensor import Array, Box
from gemma_convert.convert.writers import checked_file, orbax_verify
from tests.checkpoints import (
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
def inputs(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."), shards=2)
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    return tmp_path


def merge(inputs: Path, out: Path, *options: Any) -> int:
    words = ["orbax-to-hf", inputs / "run", "--base", inputs / "base", "--out", out]
    return run_cli(*words, "--alpha", 5, "--max-shard-size", "3kB", *options)


def back(inputs: Path, out: Path, *options: Any) -> int:
    words = ["hf-to-orbax", inputs / "base", "--layout", "tunix", "--out", out]
    return run_cli(*words, *options)


def told(capsys: pytest.CaptureFixture[str], message: str) -> None:
    captured = capsys.readouterr()
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", captured.err), captured.err
    assert captured.out == ""


@pytest.mark.parametrize("options", [[], ["--force"], ["--dry-run"], ["--force", "--dry-run"]])
@pytest.mark.parametrize(
    "out",
    [
        "base",
        "base/merged",
        "run",
        "run/merged",
        "run/0",
        "run/0/merged",
        "run/0/model_params",
        ".",
    ],
)
def test_inside_an_input(
    inputs: Path, out: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(inputs)
    assert merge(inputs, inputs / out, *options) == 1
    told(capsys, "are the same directory or one holds the other; choose another --out")
    assert snapshot(inputs) == before


@pytest.mark.parametrize("out", ["base", "base/orbax"])
def test_inside_an_input_on_the_way_back(
    inputs: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(inputs)
    assert back(inputs, inputs / out, "--force") == 1
    told(capsys, "are the same directory or one holds the other")
    assert snapshot(inputs) == before


def test_a_base_without_weights_is_an_input_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_base(tmp_path / "base", GEMMA3, {})
    write_run(tmp_path / "run", tunix_arrays(GEMMA3))
    before = snapshot(tmp_path)
    base = tmp_path / "base"
    assert run_cli("orbax-to-hf", tmp_path / "run", "--base", base, "--out", base, "--force") == 1
    told(capsys, "are the same directory or one holds the other")
    assert snapshot(tmp_path) == before


def test_an_output_that_exists(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (inputs / "out").mkdir()
    (inputs / "out" / "mine").touch()
    before = snapshot(inputs)
    assert merge(inputs, inputs / "out") == 1
    told(capsys, "out exists and is not empty; choose another --out, or replace it with --force")
    assert merge(inputs, inputs / "out" / "mine", "--force") == 1
    told(capsys, "mine exists and is a file; choose another --out")
    assert snapshot(inputs) == before


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_disk_too_small_is_told_before_anything_is_written(
    inputs: Path,
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = snapshot(inputs)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_234_567))
    for job in (merge, back):
        assert job(inputs, inputs / "new" / "out", *options) == 1
        told(capsys, r"out needs 0\.07 GB, the disk has 0\.00 GB free; free some space")
    assert snapshot(inputs) == before


class Broken:
    """Reads of weights that work for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self.reads = 0
        original = SafetensorsTensor.read

        def read(tensor: SafetensorsTensor, box: Box) -> Array:
            self.reads += 1
            if self.reads == 20:
                raise error
            return original(tensor, box)

        monkeypatch.setattr(SafetensorsTensor, "read", read)


@pytest.mark.parametrize("job", [merge, back])
@pytest.mark.parametrize(
    "error", [InputError("shard 2 is cut off", "download it again"), RuntimeError("a bug")]
)
@pytest.mark.parametrize("old", [False, True])
def test_an_error_in_the_middle(
    inputs: Path, job: Any, error: BaseException, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left, and with --force the old output is as it was."""
    if old:
        (inputs / "out").mkdir()
        (inputs / "out" / "model.safetensors").write_text("old")
    before = snapshot(inputs)
    broken = Broken(monkeypatch, error)
    assert job(inputs, inputs / "out", "--force") == 1
    assert broken.reads >= 20
    assert snapshot(inputs) == before


def test_a_corrupted_shard_is_found_and_not_kept(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bad_disk(descriptor: int, data: memoryview, offset: int) -> None:
        write(descriptor, memoryview(bytes(len(data))), offset)

    write = checked_file.write_at
    before = snapshot(inputs)
    monkeypatch.setattr(checked_file, "write_at", bad_disk)
    assert merge(inputs, inputs / "out") == 1
    told(capsys, "the values read back differ from those written; the disk or its file system")
    assert snapshot(inputs) == before


def test_a_corrupted_tree_is_found_and_not_kept(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = orbax_verify.open_orbax

    def bad_disk(path: Path) -> Any:
        found = opened(path)
        name = "layers.1.mlp.up_proj.kernel"
        values = found[name].numpy()
        values[3, 3] += 1
        monkeypatch.setattr(found[name], "read", lambda box: np.ascontiguousarray(values))
        return found

    before = snapshot(inputs)
    monkeypatch.setattr(orbax_verify, "open_orbax", bad_disk)
    assert back(inputs, inputs / "out") == 1
    told(capsys, "up_proj.kernel: the values read back differ from those written")
    assert snapshot(inputs) == before


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("job", [merge, back])
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(inputs: Path, job: Any, mask: int) -> None:
    """Of everything in the output, side files copied from elsewhere too."""
    side = inputs / "base" / "tokenizer.json"
    side.write_text("{}")
    side.chmod(0o600)
    os.umask(mask)
    assert job(inputs, inputs / "out", "--quiet") == 0
    for path in (inputs / "out", *(inputs / "out").rglob("*")):
        full = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == full & ~mask, path
