"""A Hub on loopback, reached as a user's environment would have it, and a cache of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import GEMMA3, base_arrays, factor_arrays, run_cli, write_base, write_run
from tests.hub_push import SIDE
from tests.hub_server import TOKEN, Hub, running_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty Hub that knows `TOKEN`; pauses between attempts are cut short."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # Read when huggingface_hub is imported, which another test may have done.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "hf" / "assets"))
    pause = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: pause(min(seconds, 0.01)))
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sharded model directory."""
    weights = base_arrays(GEMMA3, "model.")
    return write_base(tmp_path / "model", GEMMA3, weights, shards=3, files=SIDE)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A merged directory as this program writes it, with its ledger."""
    readme = "---\nlicense: gemma\nlicense_link: https://ai.google.dev/gemma/terms\n---\nBase"
    base = write_base(
        tmp_path / "secret place" / "base",
        {**GEMMA3, "_name_or_path": "/home/someone/models/base"},
        base_arrays(GEMMA3, "model."),
        files={**SIDE, "README.md": readme},
    )
    run = write_run(tmp_path / "secret place" / "run", factor_arrays(GEMMA3))
    out = tmp_path / "merged"
    words = ["orbax-to-hf", run, "--base", base, "--out", out, "--alpha", "5", "--quiet"]
    assert run_cli(*words, "--max-shard-size", "3kB") == 0
    return out
