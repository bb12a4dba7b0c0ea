"""``--engine ray`` on a cluster of two machines: the same bytes, whatever dies on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.cluster import engine
from gemma_convert.convert.cluster.session import ADDRESS, connected
from gemma_convert.convert.writers.journal import Journal
from tests.checkpoints import GEMMA3, base_arrays, run_cli, snapshot, write_base
from tests.cluster.conftest import MACHINE
from tests.cluster.faults import faulty

AGAIN = "what is finished is kept; run the same command again, it goes on from there"

pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called"),  # jax's, as a machine is added
]


def words(inputs: Path, out: str, *options: Any) -> list[str]:
    command = ["orbax-to-hf", inputs / "run", "--base", inputs / "base", "--out", inputs / out]
    command += ["--alpha", 5, "--max-shard-size", "900", "--quiet", *options]
    return [str(word) for word in command]


def merge(inputs: Path, out: str, *options: Any) -> int:
    return run_cli(*words(inputs, out, *options))


def assert_same_output(inputs: Path, out: str) -> None:
    """Every byte, and of the ledger all but what tells of the run; nothing is left beside it."""
    assert merge(inputs, "local") == 0
    found, expected = snapshot(inputs / out), snapshot(inputs / "local")
    ledgers = [json.loads(files.pop("conversion.json") or "") for files in (found, expected)]
    for ledger in ledgers:
        for key in ("created", "seconds", "peak_memory_bytes", "command"):
            del ledger[key]
        del ledger["output"]["path"]
    assert found == expected
    assert ledgers[0] == ledgers[1]
    assert len([name for name in found if name.endswith(".safetensors")]) > 5
    assert not (inputs / f".{out}.partial").exists()


def shards(directory: Path) -> dict[str, tuple[int, int]]:
    stats = {path.name: path.stat() for path in directory.glob("*.safetensors")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def finished(inputs: Path, out: str) -> dict[str, tuple[int, int]]:
    place = inputs / f".{out}.partial"
    found = shards(place / "output")
    assert Journal.peek(place / "journal").pieces.keys() == found.keys()
    return found


@pytest.fixture
def address(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(ADDRESS, cluster.address)
    return str(cluster.address)


def test_the_same_bytes(
    inputs: Path, address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From relative paths, quietly, with the process's own handler of SIGTERM kept."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(inputs)
    assert merge(Path(), "out", "--engine", "ray") == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    assert capfd.readouterr() == ("", "")
    monkeypatch.delenv(ADDRESS)
    assert_same_output(Path(), "out")


def test_a_worker_killed_midway(
    inputs: Path, address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with faulty(address, "kill-once", tmp_path) as ray:
        assert merge(inputs, "out", "--engine", "ray") == 0
        with connected() as same:
            assert same is ray
            print("what Ray has to say")
        assert ray.is_initialized()  # a connection of someone else's stays
    assert capfd.readouterr().out == ""  # it is for a result that machines read
    assert (tmp_path / "fault").is_file()
    assert_same_output(inputs, "out")


def test_a_machine_lost_midway(inputs: Path, cluster: Any, address: str, tmp_path: Path) -> None:
    lost = cluster.add_node(**MACHINE)

    def lose() -> None:
        deadline = time.monotonic() + 60
        while not (tmp_path / "fault").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        cluster.remove_node(lost, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    with faulty(address, "hang", tmp_path, lost.node_id):
        assert merge(inputs, "out", "--engine", "ray") == 0
    thread.join()
    assert (tmp_path / "fault").exists()
    assert_same_output(inputs, "out")


def test_a_shard_whose_workers_all_die(
    inputs: Path, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are kept, and one machine alone goes on with them."""
    with faulty(address, "kill-second-shard", tmp_path):
        assert merge(inputs, "out", "--engine", "ray") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: model-00002-of-000")
    assert "whoever wrote it died 4 times" in error
    before = finished(inputs, "out")
    assert before
    assert error.endswith(f": {AGAIN}")
    assert merge(inputs, "out") == 0
    assert before.items() <= shards(inputs / "out").items()
    assert_same_output(inputs, "out")


KILLED = """
import os, signal, sys
from gemma_convert.cli import main
from gemma_convert.convert.writers.journal import Journal
finish = Journal.finish
def killed(self, piece, record):
    finish(self, piece, record)
    if len(self.pieces) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.finish = killed
main(sys.argv[1:])
"""


@pytest.mark.parametrize("engines", [("ray", "ray"), ("local", "ray")])
def test_a_killed_run_goes_on(inputs: Path, address: str, engines: tuple[str, str]) -> None:
    command = [sys.executable, "-c", KILLED, *words(inputs, "out", "--engine", engines[0])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = finished(inputs, "out")
    assert len(before) == 3
    assert merge(inputs, "out", f"--engine={engines[1]}") == 0
    assert before.items() <= shards(inputs / "out").items()
    assert_same_output(inputs, "out")


def test_an_error_in_a_task(inputs: Path, address: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It reads as it does on one machine, and leaves as little."""
    values = base_arrays(GEMMA3, "model.")
    name = "model.layers.1.mlp.down_proj.weight"
    values[name] = np.full_like(values[name], 1e6)
    for path in (inputs / "base").iterdir():
        path.unlink()
    (inputs / "base").rmdir()
    write_base(inputs / "base", GEMMA3, values, shards=2)
    before = snapshot(inputs)
    errors = []
    for name in ("local", "ray"):
        assert merge(inputs, "out", "--engine", name, "--dtype", "float16") == 1
        errors.append(capfd.readouterr().err)
        assert snapshot(inputs) == before
    assert errors[0] == errors[1]
    assert errors[0].startswith("error: model.layers.1.mlp.down_proj.weight: a value as large as ")


def test_an_input_that_changes(
    inputs: Path,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Between the plan and the tasks."""
    other = write_base(inputs / "other", GEMMA3, base_arrays(GEMMA3, "model.", seed=5), shards=2)
    connected = engine.connected

    def changed() -> Any:
        for path in other.glob("*.safetensors"):
            path.replace(inputs / "base" / path.name)
        return connected()

    monkeypatch.setattr(engine, "connected", changed)
    assert merge(inputs, "out", "--engine", "ray") == 1
    err = capfd.readouterr().err
    assert "base/model-00001-of-00002.safetensors has changed since; inputs and output must" in err
    assert err.count("\n") == 1
    assert not (inputs / "out").exists()
