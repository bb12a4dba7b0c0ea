"""Runs that are interrupted, run out of disk, or find their source changed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.readers.safetensors_tensor import SafetensorsTensor
from gemma_convert.convert.tensor import Array, Box
from gemma_convert.convert.writers import checked_file
from gemma_convert.convert.writers.journal import Journal
from gemma_convert.interrupts import interrupted
from tests.checkpoints import (
    GEMMA3,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    snapshot,
    write_base,
    write_run,
)

GO_ON = "run the same command again, it goes on from there"


def make_inputs(directory: Path, seed: int = 0) -> None:
    write_base(directory / "base", GEMMA3, base_arrays(GEMMA3, "model.", seed=seed), shards=2)
    write_run(directory / "run", factor_arrays(GEMMA3))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """An interrupt of one test is none of the next."""
    yield
    interrupted.clear()


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    make_inputs(tmp_path)
    return tmp_path


def merge(inputs: Path, out: Path, *options: Any) -> int:
    words = ["orbax-to-hf", inputs / "run", "--base", inputs / "base", "--out", out]
    return run_cli(*words, "--alpha", 5, "--max-shard-size", "600", *options)


def back(inputs: Path, out: Path, *options: Any) -> int:
    return run_cli("hf-to-orbax", inputs / "base", "--layout", "tunix", "--out", out, *options)


def at_read(monkeypatch: pytest.MonkeyPatch, number: int, happen: Any) -> None:
    """Let something happen at the ``number``-th read of a weight."""
    reads = iter(range(1, 10**6))
    original = SafetensorsTensor.read

    def read(tensor: SafetensorsTensor, box: Box) -> Array:
        if next(reads) == number:
            happen()
        return original(tensor, box)

    monkeypatch.setattr(SafetensorsTensor, "read", read)


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupt_wrapped() -> None:
    """As a library does it that catches everything."""
    interrupted.set()
    raise RuntimeError("the stream was closed")


def shards(directory: Path) -> dict[str, tuple[int, int]]:
    stats = {path.name: path.stat() for path in directory.glob("*.safetensors")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


@pytest.mark.parametrize(
    ("options", "happen"),
    [([], interrupt), (["--quiet"], interrupt), (["--quiet"], interrupt_wrapped)],
)
def test_an_interrupt_says_how_to_go_on(
    inputs: Path,
    options: list[str],
    happen: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = inputs / "out"
    with monkeypatch.context() as patch:
        at_read(patch, 20, happen)
        assert merge(inputs, out, *options) == 130
    interrupted.clear()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"interrupted; what is finished is kept beside {out}; {GO_ON}"
    assert not out.exists()
    place = inputs / ".out.partial"
    before = shards(place / "output")
    assert Journal.peek(place / "journal").pieces.keys() == before.keys()
    assert len(before) > 1
    assert merge(inputs, out, *options) == 0
    err = capsys.readouterr().err
    assert (f"note: going on where an interrupted run to {out} ended\n" in err) == (not options)
    after = shards(out)
    assert len(after) > len(before)
    assert {name: after[name] for name in before} == before
    assert not place.exists()


def test_a_finished_shard_that_changed_is_written_again(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = inputs / "out"
    assert merge(inputs, inputs / "whole") == 0
    with monkeypatch.context() as patch:
        at_read(patch, 20, interrupt)
        assert merge(inputs, out) == 130
    changed, *others = sorted((inputs / PLACE).glob("*.safetensors"))
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    kept = {path.name: path.stat().st_ino for path in others}
    assert kept
    assert merge(inputs, out) == 0
    assert {name: (out / name).stat().st_ino for name in kept} == kept
    for path in (inputs / "whole").glob("*.safetensors"):
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_an_interrupted_tree_leaves_nothing(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An Orbax output is one piece."""
    before = snapshot(inputs)
    with monkeypatch.context() as patch:
        at_read(patch, 20, interrupt)
        assert back(inputs, inputs / "out") == 130
    assert capsys.readouterr().err.endswith(
        "interrupted; nothing was finished, so nothing is kept\n"
    )
    assert snapshot(inputs) == before


@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk(
    inputs: Path, old: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands at the output stays until the new one is whole."""
    out = inputs / "out"
    if old:
        out.mkdir()
        (out / "model.safetensors").write_text("old")
    before = snapshot(out)
    write = checked_file.write_at

    def full(descriptor: int, data: memoryview, offset: int) -> None:
        if len(shards(inputs / PLACE)) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(checked_file, "write_at", full)
        assert merge(inputs, out, "--force") == 1
    err = capsys.readouterr().err
    assert re.search(rf"^error: output {out} could not be written: No space left .*{GO_ON}$", err)
    assert snapshot(out) == before
    finished = shards(inputs / PLACE)
    assert len(finished) == 3  # the one that did not fit is gone
    assert merge(inputs, out, "--force") == 0
    assert {name: shards(out)[name] for name in finished} == finished


PLACE = Path(".out.partial") / "output"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 70 MiB: what a run keeps free (64 MiB), and a little more."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=70m", "tmpfs", str(place)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def write_for_ever(file: Any) -> None:
    while True:
        file.write(bytes(1 << 12))


def test_a_disk_that_is_really_full(
    inputs: Path,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, filler = small_disk / "out", small_disk / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            write_for_ever(file)

    with monkeypatch.context() as patch:
        at_read(patch, 20, fill)
        assert merge(inputs, out) == 1
    assert "No space left on device; see to the free space" in capsys.readouterr().err
    assert not out.exists()
    finished = shards(small_disk / PLACE)
    assert finished
    filler.unlink()
    assert merge(inputs, out) == 0
    assert {name: shards(out)[name] for name in finished} == finished
    assert merge(inputs, inputs / "whole") == 0
    assert_same_bits(read_hf(out), read_hf(inputs / "whole"))


def test_a_source_that_changed_meanwhile(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        at_read(patch, 20, interrupt)
        assert merge(inputs, inputs / "out") == 130
    make_inputs(inputs / "other", seed=5)
    for path in (inputs / "other" / "base").glob("*.safetensors"):
        os.replace(path, inputs / "base" / path.name)
    capsys.readouterr()
    assert merge(inputs, inputs / "out") == 0
    changed = r"base/model-0000[12]-of-00002\.safetensors has changed since"
    assert re.search(
        rf"^note: an interrupted run to .*out is thrown away: .*{changed}$",
        capsys.readouterr().err,
        re.MULTILINE,
    )
    assert merge(inputs, inputs / "whole") == 0
    assert_same_bits(read_hf(inputs / "out"), read_hf(inputs / "whole"))


@pytest.mark.parametrize("file", ["run", "tokenizer.json"])
def test_other_inputs_that_changed_meanwhile(
    inputs: Path, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (inputs / "base" / "tokenizer.json").write_text("{}")
    with monkeypatch.context() as patch:
        at_read(patch, 20, interrupt)
        assert merge(inputs, inputs / "out") == 130
    if file == "run":
        (inputs / "run").rename(inputs / "first")
        write_run(inputs / "run", factor_arrays(GEMMA3, seed=8))
    else:
        (inputs / "base" / file).write_text("{} ")
    capsys.readouterr()
    assert merge(inputs, inputs / "out") == 0
    assert re.search("is thrown away: .* has changed since", capsys.readouterr().err)
    assert merge(inputs, inputs / "whole") == 0
    assert_same_bits(read_hf(inputs / "out"), read_hf(inputs / "whole"))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("base/model-00001-*", "{}/base/model-00001-of-00002.safetensors has"),
        ("run/0/model_params/d/*", "{}/run/0/model_params/* has"),
        ("base/tokenizer.json", "tokenizer.json has"),
        ("base/config.json", "what configs and metadata of {}/base say has"),
    ],
)
def test_a_file_changed_in_place(
    inputs: Path,
    pattern: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To the same size, its time of modification set back."""
    (inputs / "base" / "tokenizer.json").write_text('{"a": 1}')
    (inputs / "base" / "config.json").write_text(json.dumps({**GEMMA3, "note": 1}))
    with monkeypatch.context() as patch:
        at_read(patch, 20, interrupt)
        assert merge(inputs, inputs / "out") == 130
    path = next(inputs.glob(pattern))
    stat, data = path.stat(), path.read_bytes()
    path.write_bytes(data.replace(b" 1}", b" 2}") if path.suffix == ".json" else data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    capsys.readouterr()
    assert merge(inputs, inputs / "out") == 0
    expected = f"is thrown away: {told.format(inputs)} changed since\n"
    assert expected in capsys.readouterr().err


def test_another_step_that_was_saved_meanwhile(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the one that the command names."""
    with monkeypatch.context() as patch:
        at_read(patch, 20, interrupt)
        assert merge(inputs, inputs / "out", "--step", 0) == 130
    before = shards(inputs / PLACE)
    shutil.copytree(inputs / "run" / "0", inputs / "run" / "1")
    capsys.readouterr()
    assert merge(inputs, inputs / "out", "--step", 0) == 0
    assert "is thrown away" not in capsys.readouterr().err
    assert {name: shards(inputs / "out")[name] for name in before} == before


@pytest.mark.parametrize(
    ("options", "same"),
    [(["--dtype", "float32"], False), (["--max-shard-size", "700"], False), (["--quiet"], True)],
)
def test_another_command_to_the_same_output(
    inputs: Path,
    options: list[str],
    same: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        at_read(patch, 20, interrupt)
        assert merge(inputs, inputs / "out") == 130
    before = shards(inputs / PLACE)
    capsys.readouterr()
    assert merge(inputs, inputs / "out", *options) == 0
    after = shards(inputs / "out")
    kept = {name for name in before if after.get(name) == before[name]}
    assert kept == (before.keys() if same else set())
    assert ("is thrown away: it was another command" in capsys.readouterr().err) == (not same)


def test_what_is_named_is_on_the_disk_first(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard, then its directory, then the journal's line; all files, then the output's name."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        calls.append(("rename", target.name))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    assert merge(inputs, inputs / "out", "--quiet") == 0
    names = sorted(path.name for path in (inputs / "out").iterdir())
    parts = [name for name in names if name.endswith(".safetensors")]
    expected = [("sync", "journal"), ("sync", ".out.partial")]
    for name in parts:
        expected += [("sync", name), ("sync", "output"), ("sync", "journal")]
    assert calls[: len(expected)] == expected
    rest = calls[len(expected) :]
    assert sorted(rest[: len(names)]) == [("sync", name) for name in names]
    assert rest[len(names) :] == [
        ("sync", "output"),
        ("sync", "journal"),
        ("rename", "whole"),
        ("sync", ".out.partial"),
        ("rename", "out"),
        ("sync", inputs.name),
    ]
