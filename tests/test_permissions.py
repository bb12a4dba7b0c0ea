"""Modes of outputs: what the umask leaves, as every program that writes files does it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    base_arrays,
    factor_arrays,
    run_cli,
    write_base,
    write_run,
)

UMASKS = (0o022, 0o027, 0o077)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a run that others may not read: modes are not copied."""
    directory = tmp_path_factory.mktemp("inputs")
    files = {"tokenizer.json": "{}", "additional_chat_templates/tool.jinja": "x"}
    write_base(directory / "base", GEMMA3, base_arrays(GEMMA3, "model."), shards=2, files=files)
    write_run(directory / "run", factor_arrays(GEMMA3))
    for path in directory.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return directory


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def check_modes(directory: Path, mask: int) -> None:
    for path in (directory, *directory.rglob("*")):
        expected = (0o777 if path.is_dir() else 0o666) & ~mask
        assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(expected), path


def words(kind: str, inputs: Path, out: Path) -> list[object]:
    base, run = inputs / "base", inputs / "run"
    alpha: list[object] = ["--alpha", ALPHA, "--out", out, "--quiet"]
    return {
        "hf": ["orbax-to-hf", run, "--base", base, "--max-shard-size", "2kB", *alpha],
        "tunix": ["hf-to-orbax", base, "--layout", "tunix", *alpha[2:]],
        "deepmind": ["hf-to-orbax", base, "--layout", "deepmind", *alpha[2:]],
        "peft": ["orbax-to-peft", run, "--base", base, *alpha],
    }[kind]


@pytest.mark.parametrize("mask", UMASKS, ids=oct)
@pytest.mark.parametrize("kind", ["hf", "tunix", "deepmind", "peft"])
def test_outputs_follow_the_umask(kind: str, mask: int, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with umask(mask):
        assert run_cli(*words(kind, inputs, out)) == 0
    check_modes(tmp_path / "new", mask)


def test_what_replaces_an_output_follows_the_umask_too(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with umask(0o077):
        assert run_cli(*words("hf", inputs, out)) == 0
    with umask(0o022):
        assert run_cli(*words("hf", inputs, out), "--force", "--dtype", "float32") == 0
    check_modes(out, 0o022)
