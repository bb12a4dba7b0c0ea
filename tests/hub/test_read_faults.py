"""Reading from a Hub that refuses or sends what it should not, and into a cache that is full."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from gemma_convert.convert.hub import fetching
from gemma_convert.convert.hub.session import PassingError, hub_errors
from gemma_convert.convert.readers import open_base, open_headers
from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    snapshot,
    write_base,
    write_run,
)
from tests.hub_server import Fault, Hub

REPO = "google/gemma-3-tiny"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def base(hub: Hub, tmp_path: Path) -> Path:
    weights = base_arrays(GEMMA3, "model.")
    directory = write_base(tmp_path / "local" / "base", GEMMA3, weights, shards=3)
    hub.add(REPO, {n: d for n, d in snapshot(directory).items() if d is not None})
    return directory


@pytest.fixture
def merge(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """A merge onto the base of the Hub that fails: its one line."""
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    words = ["orbax-to-hf", run, "--alpha", ALPHA, "--quiet", "--base", REPO]

    def failing() -> str:
        assert run_cli(*words, "--out", tmp_path / "out") == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert not list((tmp_path / "hf").rglob("*.incomplete"))
        return err

    return failing


@pytest.mark.parametrize("fault", ["short", "changed"])
def test_a_shard_that_arrives_otherwise(
    hub: Hub, base: Path, merge: Callable[[], str], fault: str
) -> None:
    """It is not left in the cache, where it would pass for the right one."""
    data = (base / SHARD).read_bytes()
    other = data[:-9] if fault == "short" else data[:-1] + bytes([data[-1] ^ 1])
    hub.sends[SHARD] = other
    found = {
        "short": rf"it did not arrive whole: Consistency check failed: .* {len(data)} ",
        "changed": rf"what arrived is another file than the Hub lists: expected {len(data)} bytes, "
        rf"sha256:\w+, found {len(data)} bytes, sha256:\w+; run the same command again",
    }[fault]
    assert re.search(rf"^error: hf://{REPO}@\w+/{SHARD}: {found}", merge())
    hub.sends.clear()
    assert_same_bits(arrays(open_base(Path(REPO))), read_hf(base))


def test_a_file_that_arrives_otherwise_once(hub: Hub, base: Path) -> None:
    hub.sends["config.json"] = b"<html>" + b"x" * (len((base / "config.json").read_bytes()) - 6)

    def mended(method: str, path: str) -> None:
        if len(hub.sent("GET", "config.json")) > 1:
            hub.sends.clear()

    hub.on_request = mended
    assert open_base(Path(REPO)).config == GEMMA3


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_gated_model(hub: Hub, merge: Callable[[], str], method: str, status: int) -> None:
    """The listing is public; the first file, or the first header, is refused."""
    gated = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}
    hub.faults.append(Fault(method, "/resolve/", status, 99, gated))
    assert re.search(
        rf"^error: hf://{REPO}@\w+/\S+: the model is gated \(HTTP {status}\), and whoever asks has "
        r"not accepted its terms; accept them on its page, then log in with `hf auth login`",
        merge(),
    )


def test_a_cache_without_room(
    hub: Hub, merge: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before anything of the weights is fetched."""
    room = 1500

    class Usage:
        free = room

    monkeypatch.setattr(fetching, "disk_usage", lambda place: Usage)
    err = merge()
    assert f"and the Hub's cache {tmp_path / 'hf' / 'hub'} has room for 0.000 GB; free some" in err
    assert not [p for p in hub.sent("HEAD", "/resolve/") if p.endswith(".safetensors")]


def test_a_cache_that_fills(merge: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    def full(url: str, file: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    assert re.search(
        rf"^error: hf://{REPO}@\w+/\S+: the Hub's cache cannot take it: No space left on device",
        merge(),
    )


def test_a_cache_that_cannot_be_written(
    base: Path, merge: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    place = base / "config.json" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    err = merge()
    assert re.search(rf"the Hub's cache cannot take it: Not a directory \({place}", err)
    assert "name another place with HF_HUB_CACHE" in err


def test_a_server_that_does_not_know_ranges(hub: Hub) -> None:
    """It sends all of a file; the rest behind the header is not waited for."""
    values = {"model.embed_tokens.weight": np.zeros((8, 1 << 20), np.float32)}
    hub.add("org/large", {"model.safetensors": save(values), "config.json": b"{}"})
    hub.knows_ranges = False
    assert list(open_headers("hf://org/large")) == list(values)
    assert hub.cut_off.get(timeout=30).endswith("/model.safetensors")


def test_a_long_header_from_such_a_server(hub: Hub) -> None:
    values = {f"model.layers.{i}.{'x' * 200}": np.full(1, i, np.float32) for i in range(1200)}
    hub.add("org/long", {"model.safetensors": save(values), "config.json": json.dumps({}).encode()})
    hub.knows_ranges = False
    assert list(open_headers("hf://org/long")) == list(values)


def test_a_client_that_another_thread_has_closed() -> None:
    """huggingface_hub closes the client of all threads where one of them cannot connect."""
    import httpx

    client = httpx.Client()
    client.close()
    with (
        pytest.raises(PassingError, match=r"^org/x: the Hub cannot be reached"),
        hub_errors("org/x"),
    ):
        client.get("http://127.0.0.1:9")
