"""Models that several tests compare; none of them is changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.logits_pairs import DEEP, ids, save
from tests.stand_in import Serve, serving
from tests.tiny_cases import CASES


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server with the given answer; its address."""
    with serving() as start:
        yield start


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "few.json"
    path.write_text(json.dumps([{"name": "few", "ids": ids(14)}]))
    return path


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 of twelve layers, as transformers saves it."""
    return save(DEEP, tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 4 with experts and layer scalars."""
    return save(CASES["gemma4-moe"], tmp_path_factory.mktemp("experts"))
