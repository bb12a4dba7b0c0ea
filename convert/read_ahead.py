"""Read tensors block by block, one block ahead of whoever uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from gemma_convert.convert.errors import naming
from gemma_convert.convert.tensor import Array, Box, Tensor, blocks

AHEAD = 1
"""Blocks that are read, or being read, while one is in use."""


def read_ahead(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Array]]:
    """Every block of every tensor, in order, with the tensor's name.

    A thread reads and computes the next block while the caller hashes and writes this one, so at
    most two blocks are in memory.

    Raises:
        OutputError: From a tensor, with its name in front; other errors pass through.
    """
    pending: deque[tuple[str, Future[Array]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as pool:
        for name, tensor in tensors.items():
            for box in blocks(tensor):
                pending.append((name, pool.submit(_read, name, tensor, box)))
                if len(pending) > AHEAD:
                    yield _take(pending)
        while pending:
            yield _take(pending)


def _take(pending: deque[tuple[str, Future[Array]]]) -> tuple[str, Array]:
    name, future = pending.popleft()
    return name, future.result()


def _read(name: str, tensor: Tensor, box: Box) -> Array:
    with naming(name):
        return tensor.read(box)
