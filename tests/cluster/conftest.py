"""A Ray cluster of two machines on this one, and inputs for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import GEMMA3, base_arrays, factor_arrays, write_base, write_run

MACHINE = {"num_cpus": 1, "object_store_memory": 100 << 20}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    machines = Cluster(initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False})
    try:
        machines.add_node(**MACHINE)
        yield machines
    finally:
        machines.shutdown()
        patch.undo()


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    files = {"tokenizer.json": "{}"}
    write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."), shards=2, files=files)
    write_run(tmp_path / "run", factor_arrays(GEMMA3))
    return tmp_path
