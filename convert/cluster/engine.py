"""The engine that has shards written by tasks of a Ray cluster.

A task writes into a directory of its own beside the output. Only this process moves a finished
file to its name and notes it in the journal, so a task that was given up for dead and goes on
cannot touch the output.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gemma_convert.convert.cluster.session import connected
from gemma_convert.convert.cluster.worker import Order, make_shard
from gemma_convert.convert.errors import ClusterError
from gemma_convert.convert.tensor import recall_all
from gemma_convert.convert.writers.engine import Engine, Finished
from gemma_convert.convert.writers.safetensors import Progress, Shard
from gemma_convert.convert.writers.staging import tasks_beside

TASK_CPUS = 2
"""Processors of a task, and its threads that read and compute; fewer where no machine has them."""

RETRIES = 3
"""How often Ray runs a task again whose process or machine died."""

_TURN_SECONDS = 1.0


def ray_engine(arguments: Sequence[str], identity: Mapping[str, Any]) -> Engine:
    """An engine whose tasks plan the same output by the same command line.

    Args:
        arguments: As typed behind ``gemma-convert``.
        identity: What the command writes here; see `gemma_convert.convert.run.identify`.
    """
    return partial(_write_shards, tuple(arguments), identity)


def _write_shards(
    arguments: tuple[str, ...],
    identity: Mapping[str, Any],
    directory: Path,
    shards: Sequence[Shard],
    progress: Progress,
) -> Iterator[Finished]:
    if not shards:
        return
    with _made(tasks_beside(directory)) as tasks, connected() as ray:
        order = Order(arguments, str(Path.cwd()), identity, str(tasks))
        for part, (path, finished) in _run(ray, order, shards, progress):
            _adopt(Path(path), directory / part.name, finished)
            recall_all(part.tensors, finished.findings)
            progress(2 * part.nbytes)
            yield finished


@contextmanager
def _made(directory: Path) -> Iterator[Path]:
    """A directory that is there while the block runs."""
    directory.mkdir(exist_ok=True)
    try:
        yield directory
    finally:
        for _ in range(10):
            shutil.rmtree(directory, ignore_errors=True)
            if not directory.exists():
                break
            time.sleep(0.1)  # a task that is being ended has just made a file there


def _run(
    ray: Any, order: Order, shards: Sequence[Shard], progress: Progress
) -> Iterator[tuple[Shard, tuple[str, Finished]]]:
    """Run a task a shard; each shard with its result, in the order in which they end."""
    cpus = _task_cpus(ray)
    task = ray.remote(num_cpus=cpus, max_retries=RETRIES, scheduling_strategy="SPREAD")(make_shard)
    pending = {task.remote(order, part.name, cpus): part for part in shards}
    try:
        while pending:
            done, _ = ray.wait(list(pending), timeout=_TURN_SECONDS)
            progress(0)  # where an interrupt that Python has lost is noticed
            for reference in done:
                part = pending.pop(reference)
                yield part, _result(ray, reference, part)
    finally:
        for reference in pending:
            ray.cancel(reference, force=True)


def _task_cpus(ray: Any) -> int:
    largest = max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    return max(1, min(TASK_CPUS, int(largest)))


def _result(ray: Any, reference: Any, part: Shard) -> tuple[str, Finished]:
    try:
        result: tuple[str, Finished] = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ImportError):
            raise ClusterError(
                f"a machine of the cluster cannot run gemma-convert: {error.cause}",
                "install the same versions on all machines",
            ) from error
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"{part.name}: whoever wrote it died {RETRIES + 1} times, the last one so: "
            f"{str(error).strip().splitlines()[0]}",
            "see to that machine's memory and to Ray's logs",
        ) from error
    return result


def _adopt(made: Path, path: Path, finished: Finished) -> None:
    """Give a task's file its name in the output."""
    nbytes = made.stat().st_size if made.is_file() else None
    if nbytes != finished.written.nbytes:
        raise ClusterError(
            f"{made}: a machine wrote {finished.written.nbytes} bytes there, this one finds "
            f"{nbytes if nbytes is not None else 'nothing'}",
            "the output must lie on storage that all machines see at the same path",
        )
    made.replace(path)
