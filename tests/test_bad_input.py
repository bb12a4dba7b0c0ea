"""Damaged files through the command line: exit 1, one line with a remedy, nothing written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import (
    GEMMA3,
    base_arrays,
    factor_arrays,
    run_cli,
    snapshot,
    write_base,
    write_run,
)

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
AGAIN = "; download it again"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    files = {"tokenizer.json": "{}"}
    write_base(directory / "base", GEMMA3, base_arrays(GEMMA3, "model."), shards=2, files=files)
    write_run(directory / "run", factor_arrays(GEMMA3))
    return directory


@pytest.fixture
def inputs(pristine: Path, tmp_path: Path) -> Path:
    """A good base and a good run, to be damaged."""
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refused(inputs: Path, message: str, capsys: pytest.CaptureFixture[str], *options: Any) -> None:
    before = snapshot(inputs)
    words = ["orbax-to-hf", inputs / "run", "--base", inputs / "base", "--out", inputs / "out"]
    assert run_cli(*words, "--alpha", 5, *options) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", captured.err), captured.err
    assert captured.out == ""
    assert snapshot(inputs) == before


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_header(path: Path, change: Callable[[Any], None]) -> None:
    """Change the header of a safetensors file, its data kept as they are."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def overlap(header: dict[str, Any]) -> None:
    """Two tensors of one size in the same bytes."""
    one, two = [entry for entry in header.values() if entry.get("shape") == [10]][:2]
    two["data_offsets"] = one["data_offsets"]


def out_of_range(header: dict[str, Any]) -> None:
    last = max((n for n in header if n[0] != "_"), key=lambda n: header[n]["data_offsets"][1])
    header[last]["data_offsets"] = [offset + 10**6 for offset in header[last]["data_offsets"]]


def leave(index: dict[str, Any]) -> None:
    index["weight_map"]["model.norm.weight"] = "../../x.safetensors"


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (
        lambda base: (base / SECOND).unlink(),
        f"{INDEX} names the shard {SECOND}, which is not there; download the missing file",
    ),
    "LFS pointer for a shard": (
        lambda base: (base / FIRST).write_bytes(POINTER),
        f"{FIRST} is a Git LFS pointer, not the file itself; run `git lfs pull`",
    ),
    "LFS pointer for the config": (
        lambda base: (base / "config.json").write_bytes(POINTER),
        "config.json is a Git LFS pointer, not the file itself; run `git lfs pull`",
    ),
    "LFS pointer for the tokenizer": (
        lambda base: (base / "tokenizer.json").write_bytes(POINTER),
        "tokenizer.json is a Git LFS pointer, not the file itself; run `git lfs pull`",
    ),
    "truncated data": (
        lambda base: cut(base / SECOND, 1),
        f"{SECOND} is cut short: expected at least [0-9]+ bytes, found [0-9]+{AGAIN}",
    ),
    "truncated header": (
        lambda base: (base / FIRST).write_bytes((base / FIRST).read_bytes()[:100]),
        f"{FIRST} is cut short: expected at least [0-9]+ bytes, found 100{AGAIN}",
    ),
    "empty file": (
        lambda base: (base / FIRST).write_bytes(b""),
        f"{FIRST} is cut short: expected at least 8 bytes, found 0{AGAIN}",
    ),
    "header of 2^60 bytes": (
        lambda base: (base / FIRST).write_bytes((2**60).to_bytes(8, "little") + b"{}"),
        f"{FIRST} is not a safetensors file: its first 8 bytes give a header of {2**60} bytes",
    ),
    "overlapping offsets": (
        lambda base: edit_header(base / FIRST, overlap),
        f"header of .*{FIRST}: tensor '.*' overlaps .*{AGAIN}",
    ),
    "offsets out of range": (
        lambda base: edit_header(base / FIRST, out_of_range),
        f"header of .*{FIRST}: tensor '.*' leaves a hole after .*{AGAIN}",
    ),
    "index entry that leaves the directory": (
        lambda base: edit_json(base / INDEX, leave),
        f"{INDEX} puts tensor 'model.norm.weight' in '../../x.safetensors', which leaves the "
        "directory; do not use this index",
    ),
    "a second save's shards": (
        lambda base: shutil.copy(base / FIRST, base / SECOND),
        "(both hold tensor|which does not hold it).*; keep the files of one save only",
    ),
    "leftover shards without their index": (
        lambda base: [
            (base / INDEX).unlink(),
            shutil.copy(base / FIRST, base / "model-00001-of-00003.safetensors"),
        ],
        "holds shards of several saves: of 2 and of 3; keep the files of one save only",
    ),
    "no config": (
        lambda base: (base / "config.json").unlink(),
        "base: no config.json; give the base model's Hugging Face directory",
    ),
    "config that is no JSON": (
        lambda base: (base / "config.json").write_text("{"),
        f"config.json is not valid JSON: .*{AGAIN}",
    ),
    "no base": (
        lambda base: shutil.rmtree(base),
        "base does not exist; check the path",
    ),
    "pickles only": (
        lambda base: [
            (base / FIRST).rename(base / "pytorch_model.bin"),
            (base / SECOND).unlink(),
            (base / INDEX).unlink(),
        ],
        "holds no safetensors, only pytorch_model.bin; nothing is unpickled here",
    ),
    "a tensor that the model does not have": (
        lambda base: edit_json(
            base / "config.json",
            lambda config: config.update(num_hidden_layers=1, layer_types=["full_attention"]),
        ),
        "model.layers.1.[a-z_.]+: no parameter of a gemma3 of 1 layers .*more like it",
    ),
    "sizes of another model": (
        lambda base: edit_json(base / "config.json", lambda config: config.update(head_dim=9)),
        r"q_proj.weight: expected \(n h\) d = \(6 9\) 10 by config.json, found shape \[42, 10\]",
    ),
    "a model of another kind": (
        lambda base: edit_json(base / "config.json", lambda c: c.update(model_type="llama")),
        "model_type 'llama' is not a family known here; known: .*gemma3_text",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_base(inputs: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    harm, message = DAMAGE[damage]
    harm(inputs / "base")
    refused(inputs, message, capsys)


@pytest.mark.parametrize("damage", ["missing shard", "truncated data", "header of 2^60 bytes"])
@pytest.mark.parametrize("command", ["hf-to-orbax", "inspect"])
def test_other_commands_say_the_same(
    inputs: Path, damage: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harm, message = DAMAGE[damage]
    harm(inputs / "base")
    before = snapshot(inputs)
    more = ["--layout", "tunix", "--out", inputs / "out"] if command == "hf-to-orbax" else []
    assert run_cli(command, inputs / "base", *more) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", captured.err), captured.err
    assert captured.out == ""
    assert snapshot(inputs) == before


def test_an_unfinished_step(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (inputs / "run" / "0").rename(inputs / "run" / "0.orbax-checkpoint-tmp")
    refused(inputs, "run holds no finished step; unfinished: 0.orbax-checkpoint-tmp", capsys)


def test_an_unfinished_step_beside_a_finished_one(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(inputs / "run" / "0", inputs / "run" / "7.orbax-checkpoint-tmp")
    message = "no finished step 7; finished steps there: 0; unfinished: 7.orbax-checkpoint-tmp"
    refused(inputs, message, capsys, "--step", 7)
    words = ["orbax-to-hf", inputs / "run", "--base", inputs / "base", "--out", inputs / "out"]
    assert run_cli(*words, "--alpha", 5) == 0
    assert "note: skipped unfinished: 7.orbax-checkpoint-tmp" in capsys.readouterr().err


def test_data_missing_in_the_checkpoint(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = inputs / "run" / "0" / "model_params"
    shutil.rmtree(item / "d")
    refused(inputs, "model_params.*copy the checkpoint again", capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base", "--base", "base"], "safetensors already; give an Orbax checkpoint"),
        (["run", "--base", "run"], "is not a Hugging Face model directory; give the directory"),
        (["nowhere", "--base", "base"], "nowhere does not exist; check the path"),
        (["run", "--base", "base/config.json"], "config.json is not a safetensors file"),
    ],
)
def test_inputs_of_the_wrong_kind(
    inputs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(inputs)
    given = [word if word[0] == "-" else inputs / word for word in words]
    assert run_cli("orbax-to-hf", *given, "--out", inputs / "out", "--alpha", 5) == 1
    captured = capsys.readouterr()
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", captured.err), captured.err
    assert snapshot(inputs) == before
