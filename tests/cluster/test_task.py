"""What a task does, and what ``--engine ray`` refuses; without a cluster."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.cluster.session import ADDRESS
from gemma_convert.convert.cluster.worker import Order, make_shard
from gemma_convert.convert.commands.planned import planned
from gemma_convert.convert.errors import ClusterError
from gemma_convert.convert.ledger import versions
from gemma_convert.convert.run import identify
from gemma_convert.convert.writers.engine import in_process
from gemma_convert.convert.writers.safetensors import shard
from tests.checkpoints import run_cli, snapshot


def words(inputs: Path, out: str = "out", *options: Any) -> list[str]:
    command = ["orbax-to-hf", inputs / "run", "--base", inputs / "base", "--out", inputs / out]
    return [str(word) for word in (*command, "--alpha", 5, "--max-shard-size", "900", *options)]


@pytest.fixture
def order(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    monkeypatch.chdir(inputs)  # and back at the end, wherever a task went
    monkeypatch.setattr("gemma_convert.process.set_up", lambda: None)  # this process is no task's
    (inputs / "tasks").mkdir()
    job, settings = planned(words(inputs))
    identity = identify(job, ["gemma-convert", *words(inputs)], settings)
    return Order(tuple(words(inputs)), str(inputs), identity, str(inputs / "tasks"))


def name_of(inputs: Path) -> str:
    """The third shard of the output, which is then there to compare with."""
    assert run_cli(*words(inputs, "local", "--quiet")) == 0
    return sorted(path.name for path in (inputs / "local").glob("*.safetensors"))[2]


def test_planning_writes_nothing(inputs: Path) -> None:
    before = snapshot(inputs)
    job, settings = planned(words(inputs))
    assert settings == {"max_shard_size": 900}
    assert "model.norm.weight" in job.plan.target.tensors
    assert snapshot(inputs) == before


def test_a_task_writes_one_shard(inputs: Path, order: Order) -> None:
    """Every try in a directory of its own; what an earlier one left is gone."""
    name = name_of(inputs)
    first, _ = make_shard(order, name, 1)
    path, finished = make_shard(order, name, 2)
    assert path != first
    assert [p for p in (inputs / "tasks").rglob("*") if p.is_file()] == [Path(path)]
    assert Path(path).read_bytes() == (inputs / "local" / name).read_bytes()
    job, _ = planned(words(inputs))
    part = shard(job.plan.target.tensors, 900)[2]
    (inputs / "here").mkdir()
    (expected,) = in_process(inputs / "here", [part], lambda nbytes: None)
    assert expected.findings  # of a tensor that was merged
    assert finished == expected


REMEDY = (
    "inputs and output must lie on storage that all machines see at the same path, and stay as "
    "they are"
)


def test_tasks_that_see_something_else(inputs: Path, order: Order) -> None:
    name = name_of(inputs)
    refused = {
        f"cannot enter {inputs}/none: No such file or directory": replace(
            order, directory=f"{inputs}/none"
        ),
        f"{inputs}/none is not there": replace(order, tasks=f"{inputs}/none"),
        "the same command plans another output there": replace(
            order, identity={**order.identity, "plan": "of something else"}
        ),
    }
    for what, other in refused.items():
        with pytest.raises(ClusterError) as error:
            make_shard(other, name, 1)
        assert str(error.value) == f"machine {socket.gethostname()}: {what}; {REMEDY}"


def test_a_changed_input(inputs: Path, order: Order) -> None:
    path = inputs / "base" / "model-00002-of-00002.safetensors"
    os.utime(path, ns=(0, 0))
    with pytest.raises(ClusterError, match=f"base/{path.name} has changed since; {REMEDY}$"):
        make_shard(order, "model-00001-of-00009.safetensors", 1)


def test_side_files_are_the_asking_machines(inputs: Path, order: Order) -> None:
    """Nobody else copies them, so they may differ."""
    name = name_of(inputs)
    (inputs / "base" / "tokenizer.json").write_text('{"other": 1}')
    assert Path(make_shard(order, name, 1)[0]).is_file()


def test_other_versions(inputs: Path, order: Order) -> None:
    known = {**order.identity["versions"], "numpy": "1.0.1"}
    other = replace(order, identity={**order.identity, "versions": known})
    with pytest.raises(ClusterError) as error:
        make_shard(other, "model-00001-of-00009.safetensors", 1)
    assert str(error.value) == (
        f"machine {socket.gethostname()} has numpy {versions()['numpy']}, the one that asks has "
        "1.0.1; install the same versions on all machines"
    )


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["convert", "{run}", "--to", "tunix"], "writes Hugging Face directories only"),
        (
            ["orbax-to-hf", "{run}"],
            "reads and writes files that all machines see, not gs://buc/out",
        ),
    ],
)
def test_what_it_does_not_write(
    inputs: Path, command: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = "gs://buc/out" if "gs://" in what else inputs / "out"
    full = [word.format(run=inputs / "run") for word in command]
    full += ["--base", str(inputs / "base"), "--alpha", "5", "--out", str(out)]
    assert run_cli(*full, "--engine", "ray", "--quiet") == 2
    assert what in " ".join(capsys.readouterr().err.split())


def test_ray_that_is_missing_or_out_of_reach(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(inputs)
    monkeypatch.setenv(ADDRESS, "ray://127.0.0.1:1")
    assert run_cli(*words(inputs, "out", "--engine", "ray", "--quiet")) == 1
    assert capsys.readouterr().err == (
        "error: RAY_ADDRESS=ray://127.0.0.1:1: Ray Client is not supported; "
        "run on a machine of the cluster, with RAY_ADDRESS=auto\n"
    )
    monkeypatch.setenv(ADDRESS, "127.0.0.1:1")
    assert run_cli(*words(inputs, "out", "--engine", "ray", "--quiet")) == 1
    assert capsys.readouterr().err == (
        "error: RAY_ADDRESS=127.0.0.1:1: no cluster that can be used: [Errno 111] Connection "
        "refused; see `ray status`, or unset RAY_ADDRESS to use this machine alone\n"
    )
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_cli(*words(inputs, "out", "--engine", "ray", "--quiet")) == 1
    assert capsys.readouterr().err == (
        "error: --engine ray needs the package ray; pip install 'gemma-convert[ray]'\n"
    )
    assert snapshot(inputs) == before


def test_the_engine_is_no_part_of_the_identity(inputs: Path) -> None:
    job, settings = planned(words(inputs))
    plain = identify(job, words(inputs), settings)
    for option in (["--engine", "ray"], ["--engine=ray"], ["--engine", "local"]):
        assert identify(job, [*option, *words(inputs)], settings) == plain
    assert identify(job, words(inputs, "out", "--dtype", "float32"), settings) != plain
