"""Killed at any point, the same command goes on: nothing is done twice, the same bytes come out."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.readers import open_orbax
from tests.checkpoints import (
    GEMMA3,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    snapshot,
    write_base,
    write_run,
)
from tests.killed import Killer

MERGE = ("tensorstore", "einops", "gemma_convert.convert.jobs", "gemma_convert.convert.writers.hf")
ORBAX = (*MERGE, "orbax.checkpoint")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    files = {"tokenizer.json": "{}"}
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."), shards=2, files=files)
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    return tmp_path


def merge(inputs: Path, out: Path) -> list[Any]:
    words = ["orbax-to-hf", inputs / "run", "--base", inputs / "base", "--out", out, "--alpha", 5]
    return [*words, "--max-shard-size", "400", "--quiet", "--force"]


def back(inputs: Path, out: Path) -> list[Any]:
    return ["hf-to-orbax", inputs / "base", "--layout", "tunix", "--out", out, "--quiet"]


def finished(out: Path) -> dict[str, tuple[int, int]]:
    """The shards that the journal says are finished, each by its inode and time of change."""
    place = out.parent / f".{out.name}.partial"
    if not (place / "journal").is_file():
        return {}
    lines = (place / "journal").read_text().splitlines(keepends=True)
    names = [json.loads(line).get("finished") for line in lines if line.endswith("\n")]
    found: dict[str, tuple[int, int]] = {}
    for name in names:
        for directory in ("output", "whole"):
            path = place / directory / str(name)
            if path.is_file():
                stat = path.stat()
                found[name] = (stat.st_ino, stat.st_mtime_ns)
    return found


def ledger(out: Path) -> dict[str, Any]:
    """conversion.json but for what tells of the run and its place."""
    found = json.loads((out / "conversion.json").read_text())
    for key in ("created", "seconds", "peak_memory_bytes", "command"):
        del found[key]
    del found["output"]["path"]
    return dict(found)


def weights(out: Path) -> dict[str, bytes | None]:
    return {name: data for name, data in snapshot(out).items() if name != "conversion.json"}


def points(random_: random.Random, total: int) -> Iterator[int]:
    """Where to kill: anywhere, and every other time early, so that many kills hit one output."""
    while True:
        yield random_.randrange(1, total)
        yield random_.randrange(1, total // 6)


@pytest.mark.parametrize("seed", range(3))
def test_merges_killed_sixty_times(inputs: Path, seed: int) -> None:
    """Twenty kills a seed; an output that comes through is replaced by the next, with --force."""
    out, whole = inputs / "out", inputs / "whole"
    kills = completed = resumed = 0
    with Killer(MERGE) as killer:
        status, total = killer.run(*merge(inputs, whole), at=-1)
        assert status == 0
        assert total > 2000
        assert len(list(whole.glob("*.safetensors"))) > 10
        schedule = points(random.Random(seed), total)
        while kills < 20:
            before = finished(out)
            status, _ = killer.run(*merge(inputs, out), at=next(schedule))
            after = finished(out)
            if status == 0:
                completed += 1
                after = {n: stamp(out / n) for n in before if (out / n).is_file()}
            else:
                assert status == -signal.SIGKILL
                kills += 1
                if out.exists():
                    assert weights(out) == weights(whole)
            kept = before.keys() & after.keys()
            assert not before or not after or kept == before.keys()
            assert all(after[name] == before[name] for name in kept)
            resumed += len(kept)
        assert killer.run(*merge(inputs, out), at=-1)[0] == 0
    assert resumed > 20
    assert weights(out) == weights(whole)
    assert ledger(out) == ledger(whole)
    assert sorted(path.name for path in inputs.iterdir()) == ["base", "out", "run", "whole"]


def stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def test_orbax_outputs_killed(inputs: Path) -> None:
    """A tree is begun anew until it is written as a whole; then it is only verified again."""
    with Killer(ORBAX) as killer:
        status, total = killer.run(*back(inputs, inputs / "whole"), at=-1)
        assert status == 0
        for at in random.Random(7).sample(range(1, total), 8):
            status, _ = killer.run(*back(inputs, inputs / "out"), at=at)
            if status == 0:
                break
            assert status == -signal.SIGKILL
        else:
            assert killer.run(*back(inputs, inputs / "out"), at=-1)[0] == 0
    found, expected = open_orbax(inputs / "out"), open_orbax(inputs / "whole")
    assert_same_bits(arrays(found), arrays(expected))
    names = [sorted(p.name for p in (inputs / o / "0").iterdir()) for o in ("out", "whole")]
    assert names[0] == names[1]
