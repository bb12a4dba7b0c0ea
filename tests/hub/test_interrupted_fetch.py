"""Ctrl-C and SIGTERM while files come from a Hub that has stopped sending."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
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


@pytest.fixture
def stalled(hub: Hub) -> Iterator[Event]:
    """Set once a download of weights has begun; until the test ends, none goes on."""
    begun, over = Event(), Event()

    def stall(method: str, path: str) -> None:
        weights = method == "GET" and path.endswith(".safetensors")
        if weights and len(hub.sent("GET", path)) > 1:  # the first was for the header
            begun.set()
            over.wait(60)

    hub.on_request = stall
    yield begun
    over.set()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_does_not_wait_for_the_hub(
    hub: Hub, stalled: Event, tmp_path: Path, shards: int, number: signal.Signals
) -> None:
    weights = base_arrays(GEMMA3, "model.")
    base = write_base(tmp_path / "base", GEMMA3, weights, shards=shards)
    hub.add(REPO, {n: d for n, d in snapshot(base).items() if d is not None})
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    words = ["orbax-to-hf", str(run), "--base", REPO, "--alpha", str(ALPHA), "--quiet"]
    words += ["--out", str(tmp_path / "out")]
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "gemma_convert", *words],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert stalled.wait(60)
            process.send_signal(number)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert err == f"\ninterrupted; {GO_ON}; nothing was finished, so nothing is kept\n"
    assert process.returncode == 130
    assert not list((tmp_path / "hf").rglob("*.incomplete"))
    assert list((tmp_path / "hf").rglob("config.json"))
