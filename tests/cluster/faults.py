"""Faults inside the processes of a Ray cluster: a hook that each of them runs when it starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KIND, PLACE = "GEMMA_CONVERT_TEST_FAULT", "GEMMA_CONVERT_TEST_PLACE"
MACHINE = "GEMMA_CONVERT_TEST_MACHINE"
_PATIENCE = 60.0
_ROOT = Path(__file__).parents[2]  # the other processes import this very module


@contextmanager
def faulty(address: str, kind: str, place: Path, machine: str = "") -> Iterator[Any]:
    """Connect to a cluster whose processes misbehave; yields the module ``ray``.

    Args:
        address: Of the cluster.
        kind: ``kill-once``, ``kill-second-shard``, or ``hang`` on ``machine``, where the other
            machines do not go on before one process hangs.
        place: A directory in which the file ``fault`` is made once it happens.
        machine: The id of a machine.
    """
    import ray

    environment = {KIND: kind, PLACE: str(place), MACHINE: machine, "PYTHONPATH": str(_ROOT)}
    hooks = {"env_vars": environment, "worker_process_setup_hook": set_up}
    ray.init(address=address, runtime_env=hooks, log_to_driver=False, logging_level=40)
    try:
        yield ray
    finally:
        ray.shutdown()


def set_up() -> None:
    """In a process of the cluster: misbehave once a shard's file has something in it."""
    from gemma_convert.convert.writers import checked_file

    write = checked_file.write_at

    def write_then_fail(descriptor: int, data: memoryview, offset: int) -> None:
        write(descriptor, data, offset)
        fail(Path(f"/proc/self/fd/{descriptor}").readlink())

    checked_file.write_at = write_then_fail


def fail(path: Path) -> None:
    kind, fault = os.environ[KIND], Path(os.environ[PLACE]) / "fault"
    if kind == "hang":
        _hang(fault)
    elif kind == "kill-second-shard":
        if path.name.startswith("model-00002-"):
            os.kill(os.getpid(), signal.SIGKILL)
    elif not fault.exists():
        fault.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _hang(fault: Path) -> None:
    import ray

    if ray.get_runtime_context().get_node_id() == os.environ[MACHINE]:
        fault.touch()
        time.sleep(_PATIENCE)
        raise AssertionError("nobody has ended this process")
    deadline = time.monotonic() + _PATIENCE
    while not fault.exists():
        assert time.monotonic() < deadline, "no task came to the machine that is to be lost"
        time.sleep(0.01)
