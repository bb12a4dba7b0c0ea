"""What a task does: plan again what another machine has planned, and write one shard of it.

Nothing of a plan travels: it is made again from the command line, in less than a second, and must
come out the same.
"""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_convert.convert.errors import ClusterError

if TYPE_CHECKING:  # needs numpy, which wants `set_up` to be called first
    from gemma_convert.convert.job import Job
    from gemma_convert.convert.tensor import Tensor
    from gemma_convert.convert.writers.engine import Finished
    from gemma_convert.convert.writers.safetensors import Shard


@dataclass(frozen=True)
class Order:
    """What another machine must know to write a shard of an output.

    Attributes:
        arguments: The command line, as typed behind ``gemma-convert``.
        directory: The working directory to which its relative paths belong.
        identity: Of the output; see `gemma_convert.convert.run.identify`.
        tasks: A directory on storage that all machines see at this path.
    """

    arguments: tuple[str, ...]
    directory: str
    identity: Mapping[str, Any]
    tasks: str


def make_shard(order: Order, name: str, threads: int) -> tuple[str, Finished]:
    """Write the shard called ``name`` into a directory that is this call's alone.

    Args:
        order: Of which output.
        name: The shard's file name.
        threads: How many read and compute.

    Returns:
        The file's path, and what a journal keeps of it.

    Raises:
        ClusterError: If this machine lacks the storage, or plans another output.
        GemmaConvertError: As on one machine.
    """
    from gemma_convert.process import set_up

    set_up()
    from gemma_convert.convert.tensor import all_findings
    from gemma_convert.convert.writers.engine import Finished
    from gemma_convert.convert.writers.safetensors import write_shard

    part = _planned_shard(order, name)
    directory = _own_directory(Path(order.tasks), name)
    written = write_shard(directory, part, lambda nbytes: None, threads=threads)
    return str(directory / name), Finished(written, all_findings(part.tensors))


def _planned_shard(order: Order, name: str) -> Shard:
    from gemma_convert.convert.commands.planned import planned
    from gemma_convert.convert.writers.safetensors import shard

    _require_versions(order.identity["versions"])
    try:
        os.chdir(order.directory)
    except OSError as error:
        raise _unlike(f"cannot enter {order.directory}: {error.strerror}") from error
    job, settings = planned(order.arguments)
    _require_same_plan(order.identity, job, settings)
    tensors: Mapping[str, Tensor] = job.plan.target.tensors
    return next(p for p in shard(tensors, settings["max_shard_size"]) if p.name == name)


def _require_versions(expected: Mapping[str, str]) -> None:
    from gemma_convert.convert.run import all_versions

    for package, version in all_versions().items():
        if expected[package] != version:
            raise ClusterError(
                f"machine {socket.gethostname()} has {package} {version}, the one that asks has "
                f"{expected[package]}",
                "install the same versions on all machines",
            )


def _require_same_plan(expected: Mapping[str, Any], job: Job, settings: Mapping[str, Any]) -> None:
    """Refuse to write a shard of another output; side files are the asking machine's to copy."""
    from gemma_convert.convert.run import difference, identify

    found = {**identify(job, (), settings), "command": expected["command"]}
    if {**found, "files": {}} == {**expected, "files": {}}:
        return
    inputs, theirs = found["inputs"], expected["inputs"]
    if inputs.keys() == theirs.keys() and inputs != theirs:
        raise _unlike(difference({**expected, "files": {}}, found))
    raise _unlike("the same command plans another output there")


def _unlike(what: str) -> ClusterError:
    return ClusterError(
        f"machine {socket.gethostname()}: {what}",
        "inputs and output must lie on storage that all machines see at the same path, and stay "
        "as they are",
    )


def _own_directory(tasks: Path, name: str) -> Path:
    """A new directory; what earlier tries at this shard left is removed.

    A try that was given up may still be running somewhere. Nobody will ask for what it wrote.
    """
    tries = tasks / name
    directory = tries / uuid.uuid4().hex
    shutil.rmtree(tries, ignore_errors=True)
    try:
        tries.mkdir(exist_ok=True)
    except FileNotFoundError as error:  # not made here: the run may be over
        raise _unlike(f"{tasks} is not there") from error
    directory.mkdir()
    return directory
