"""Memory is bounded by blocks: no step asks for more of a tensor than a block and its share."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.network import Parameter
from gemma_convert.convert.registry import families
from gemma_convert.convert.relayout import Relaid
from gemma_convert.convert.repeats import Part
from gemma_convert.convert.rows import Layer
from gemma_convert.convert.tensor import BLOCK_BYTES, Array, Box, Tensor, extent
from gemma_convert.convert.writers.safetensors import shard, write_shard
from gemma_convert.surgery.adapters.adapter import Pair
from gemma_convert.surgery.delta import LowRank, Merged

ROWS, COLUMNS, RANK = 4096, 3000, 2
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Watched(Tensor):
    """A large tensor of ones that remembers the largest box it was asked for."""

    def __init__(self, *shape: int, dtype: np.dtype[np.generic] = BFLOAT16) -> None:
        self.shape = shape
        self.dtype = dtype
        self.largest = 0

    def read(self, box: Box) -> Array:
        values = np.ones(extent(box), self.dtype)
        self.largest = max(self.largest, values.nbytes)
        return values


def down_projection() -> Parameter:
    row = next(row for row in families()["gemma3"].rows if row.name == "down")
    sizes = {"d": ROWS, "f": COLUMNS}
    layer = Layer(0, False, False, False, False, False, 1.0, sizes)
    return Parameter(row, 0, layer, sizes)


def test_copying_writing_and_verifying(tmp_path: Path) -> None:
    tensor = Watched(ROWS, COLUMNS)
    assert tensor.nbytes > BLOCK_BYTES
    file = shard({"w": tensor})[0]
    reported: list[int] = []
    written = write_shard(tmp_path, file, reported.append)
    assert tensor.largest <= BLOCK_BYTES
    assert sum(reported) == tensor.nbytes + written.nbytes  # the header is read back too


def test_rearranging(tmp_path: Path) -> None:
    parameter = down_projection()
    source = Watched(COLUMNS, ROWS)
    cells = parameter.row.cells
    relaid = Relaid(
        [Part(source, {})], cells["tunix"].pattern, cells["hf"].pattern, {}, parameter.sizes
    )
    write_shard(tmp_path, shard({"w": relaid})[0], lambda _: None)
    assert source.largest <= BLOCK_BYTES


def test_merging(tmp_path: Path) -> None:
    weight = Watched(ROWS, COLUMNS)
    factors = Pair(Watched(COLUMNS, RANK), Watched(RANK, ROWS))
    parameter = down_projection()
    spellings = Spelling(TUNIX, ""), Spelling(HF, "")
    cells = [parameter.row.cell(spelling.layout).pattern for spelling in spellings]
    delta = LowRank(parameter, TUNIX, factors, 1.0)
    relaid = Relaid([Part(delta, {})], cells[0], cells[1], {}, parameter.sizes)
    merged = Merged(weight, (relaid,), BFLOAT16)
    write_shard(tmp_path, shard({"w": merged})[0], lambda _: None)
    assert weight.largest <= BLOCK_BYTES
    assert merged.survival.size == ROWS * COLUMNS
