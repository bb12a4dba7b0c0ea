"""Reading one block ahead: order, errors, and how much is held at once."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.read_ahead import AHEAD, WORKERS, read_ahead
from gemma_convert.convert.tensor import BLOCK_BYTES, Array, ArrayTensor, Box, Tensor, extent


class Counted(Tensor):
    """Rows as large as a block; counts the blocks alive and the threads that read them."""

    shape = (20, BLOCK_BYTES)
    dtype = np.dtype(np.int8)

    def __init__(self) -> None:
        self.alive = self.most = 0
        self.threads: set[str] = set()
        self.lock = threading.Lock()

    def read(self, box: Box) -> Array:
        values: Array = np.full(extent(box), box[0][0], self.dtype)
        with self.lock:
            self.alive += 1
            self.most = max(self.most, self.alive)
        weakref.finalize(values, self.released)
        self.threads.add(threading.current_thread().name)
        return values

    def released(self) -> None:
        with self.lock:
            self.alive -= 1


class Broken(ArrayTensor):
    def read(self, box: Box) -> Array:
        raise OutputError("a value does not fit", "choose another dtype")


def test_blocks_come_in_order_and_few_are_alive() -> None:
    tensor = Counted()
    seen: list[tuple[str, int]] = []
    for block in read_ahead({"a": tensor, "b": ArrayTensor(np.arange(3))}):
        seen.append((block.name, int(block.array.flat[0])))
        assert block.data.tobytes() == block.array.tobytes()
        del block
    assert seen == [*(("a", row) for row in range(20)), ("b", 0)]
    # those being read, those ahead, one in use, one that was just handed over
    assert tensor.most <= WORKERS + AHEAD + 2
    assert all(thread.startswith("read-ahead") for thread in tensor.threads)


def test_an_error_has_the_name_in_front() -> None:
    tensors: dict[str, Any] = {"good": ArrayTensor(np.ones(2)), "bad": Broken(np.ones(2))}
    blocks = read_ahead(tensors)
    assert next(blocks).name == "good"
    with pytest.raises(OutputError, match=r"^bad: a value does not fit; choose another dtype$"):
        next(blocks)
