"""Read tensors block by block, some blocks ahead of whoever writes them.

Threads read and compute; blocks come in order. How many there are at once depends on the threads
alone, not on the tensors. Arrays are computed with one BLAS thread each: see
`gemma_convert.process`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from gemma_convert.convert.errors import naming
from gemma_convert.convert.tensor import BLOCK_BYTES, Array, Box, Tensor, blocks
from gemma_convert.interrupts import interrupted

WORKERS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
"""Threads that read and compute."""

AHEAD = 1
"""Blocks that are read, beside those that threads are reading, while one is in use."""

Cut = Callable[[Tensor, int], Iterator[Box]]
"""Cuts a tensor into boxes of at most so many bytes."""


@dataclass(frozen=True)
class Block:
    """A part of a tensor.

    Attributes:
        name: The tensor's name.
        box: Where in the tensor.
        array: Its values, C-contiguous.
    """

    name: str
    box: Box
    array: Array

    @property
    def data(self) -> Array:
        """The bytes of the values, row-major, as integers."""
        return self.array.reshape(-1).view(np.uint8)


def read_ahead(
    tensors: Mapping[str, Tensor],
    block_bytes: int = BLOCK_BYTES,
    cut: Cut = blocks,
    *,
    threads: int = WORKERS,
) -> Iterator[Block]:
    """Every block of every tensor, in order.

    Args:
        tensors: What to read.
        block_bytes: Most bytes of a block.
        cut: How to cut a tensor into them.
        threads: How many read and compute.

    Raises:
        OutputError: From a tensor, with its name in front; other errors pass through.
    """
    pending: deque[Future[Block]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
    try:
        for name, tensor in tensors.items():
            for box in cut(tensor, block_bytes):
                pending.append(pool.submit(_read, name, tensor, box))
                if len(pending) > threads + AHEAD:
                    yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # A thread whose storage does not answer must not keep an interrupted run.
        pool.shutdown(wait=not interrupted.is_set(), cancel_futures=True)


def _read(name: str, tensor: Tensor, box: Box) -> Block:
    with naming(name):
        # A transposed view would be written in the wrong order.
        array = np.ascontiguousarray(tensor.read(box)).reshape([b - a for a, b in box])
    return Block(name, box, array)
