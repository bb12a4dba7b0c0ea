"""What is measured: a base of Gemma 4 31B's tensor shapes, an adapter, and a full Orbax tree.

    python -m bench.inputs DIR --layers 6

writes ``DIR/base`` (Hugging Face), ``DIR/run`` (a rank-64 Tunix adapter of every matrix) and
``DIR/tree`` (all weights in Tunix's layout), each unless it is there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.random_model import random_factors
from gemma_convert.convert.registry import families
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Array, Box, Tensor, extent
from gemma_convert.convert.writers.hf import write_hf
from gemma_convert.convert.writers.orbax import write_orbax

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHARD_BYTES = 5 * 10**9
RANK = 64


class Noise(Tensor):
    """Random weights of any size from a small pool, made as fast as memory allows."""

    dtype = BFLOAT16

    def __init__(self, shape: tuple[int, ...], pool: Array) -> None:
        self.shape = shape
        self.pool = pool

    def read(self, box: Box) -> Array:
        """Values of the pool, again and again."""
        return np.resize(self.pool, extent(box))


def config(layers: int) -> dict[str, Any]:
    """The 31B's text config with fewer layers."""
    dims = {**families()["gemma4"].models["gemma-4-31b"], "num_hidden_layers": layers}
    return {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", **dims}}


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors on the Hub."""
    prefix = model.family.nested_prefix
    return {
        prefix + name: parameter.row.cell(HF).pattern.shape(parameter.sizes)
        for parameter in model.parameters()
        for name, _ in parameter.parts(HF)
    }


def make_inputs(directory: Path, layers: int) -> None:
    """Write what of the three is not there."""
    model = read_model(config(layers), families())
    # 40 MB of numbers, so that zstd finds no repetition in its window
    pool = np.random.default_rng(0).normal(0, 0.02, 20_000_003).astype(BFLOAT16)
    tensors: dict[str, Tensor] = {name: Noise(s, pool) for name, s in shapes(model).items()}
    base = Checkpoint(tensors, config=config(layers))
    if _is_missing(directory / "base"):
        write_hf(base, directory / "base", max_shard_bytes=SHARD_BYTES, progress=lambda _: None)
    if _is_missing(directory / "run"):
        factors = random_factors(model, Spelling(TUNIX, ""), RANK, np.dtype(np.float32))
        write_orbax(factors, directory / "run")
    if _is_missing(directory / "tree"):
        spelling = Spelling(HF, model.family.nested_prefix)
        write_orbax(relayout(base, model, spelling, Spelling(TUNIX, "")), directory / "tree")


def tensor_bytes(tensors: Mapping[str, tuple[int, ...]]) -> int:
    """Size of bfloat16 tensors of these shapes."""
    return sum(Noise(shape, np.empty(0)).nbytes for shape in tensors.values())


def _is_missing(directory: Path) -> bool:
    """Make ``directory``; whether it was not there."""
    if directory.is_dir():
        return False
    directory.mkdir(parents=True)
    return True


def main() -> None:
    """Write the inputs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    make_inputs(options.directory, options.layers)


if __name__ == "__main__":
    main()
