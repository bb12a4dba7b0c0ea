"""Ctrl-C and SIGTERM while a Hub that has stopped answering is waited for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from threading import Event

import pytest

from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    base_arrays,
    factor_arrays,
    snapshot,
    write_base,
    write_run,
)
from tests.hub_server import TOKEN, Hub

REPO = "google/gemma-3-tiny"
GO_ON = "files that have come whole stay in the Hub's cache; run the same command again to go on"


class Stall:
    """Requests that are not answered until the test is over: those of ``method`` to ``path``."""

    def __init__(self, hub: Hub) -> None:
        self.begun, self.over = Event(), Event()
        self.matches: Callable[[str, str], bool] = lambda method, path: False
        hub.on_request = self

    def __call__(self, method: str, path: str) -> None:
        if self.matches(method, path):
            self.begun.set()
            self.over.wait(60)


@pytest.fixture
def stall(hub: Hub) -> Iterator[Stall]:
    made = Stall(hub)
    yield made
    made.over.set()


def interrupted(
    hub: Hub, stall: Stall, tmp_path: Path, number: signal.Signals, *words: str | Path
) -> tuple[int, str]:
    """Run a command until it waits, send it a signal; its exit status and what it said."""
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "0" if hub.xet else "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "gemma_convert", *map(str, words), "--quiet"]
    with subprocess.Popen(command, env=environment, stderr=PIPE, text=True) as process:
        try:
            assert stall.begun.wait(60)
            process.send_signal(number)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
    return process.returncode, err


@pytest.mark.parametrize("xet", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_download(
    hub: Hub, stall: Stall, tmp_path: Path, shards: int, number: signal.Signals, xet: bool
) -> None:
    if xet:
        pytest.importorskip("hf_xet")
    hub.xet = xet
    weights = base_arrays(GEMMA3, "model.")
    base = write_base(tmp_path / "base", GEMMA3, weights, shards=shards)
    hub.add(REPO, {n: d for n, d in snapshot(base).items() if d is not None})
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))

    def is_download(method: str, path: str) -> bool:
        if xet:
            return "/reconstructions/" in path
        # The first request was for the header.
        return path.endswith(".safetensors") and len(hub.sent("GET", path)) > 1

    stall.matches = is_download
    words = ["orbax-to-hf", run, "--base", REPO, "--alpha", str(ALPHA), "--out", tmp_path / "out"]
    assert interrupted(hub, stall, tmp_path, number, *words) == (
        130,
        f"\ninterrupted; {GO_ON}; nothing was finished, so nothing is kept\n",
    )
    assert not list((tmp_path / "hf").rglob("*.incomplete"))
    assert list((tmp_path / "hf").rglob("config.json"))


@pytest.mark.parametrize("asked", ["GET /api/models/", "HEAD /google/", "GET /google/"])
def test_what_comes_before(hub: Hub, stall: Stall, tmp_path: Path, asked: str) -> None:
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    hub.add(REPO, {n: d for n, d in snapshot(base).items() if d is not None})
    stall.matches = lambda method, path: re.match(asked, f"{method} {path}") is not None
    status, err = interrupted(hub, stall, tmp_path, signal.SIGINT, "inspect", f"hf://{REPO}")
    assert status == 130
    assert err.startswith("\ninterrupted")


@pytest.mark.parametrize("shards", [1, 3])
def test_an_upload(hub: Hub, stall: Stall, tmp_path: Path, shards: int) -> None:
    model = write_base(tmp_path / "m", GEMMA3, base_arrays(GEMMA3, "model."), shards=shards)
    stall.matches = lambda method, path: method == "PUT"
    status, err = interrupted(hub, stall, tmp_path, signal.SIGINT, "push", model, "org/tuned")
    assert (status, err) == (
        130,
        "\ninterrupted; nothing was committed; push again: what has arrived is not sent twice\n",
    )
