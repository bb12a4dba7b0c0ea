"""Random checkpoints of a family's true architecture, for the demo and for tests.

Nothing in them is neutral: norms and scalars are off one, and every layer has values of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import ArrayTensor, Tensor


def random_model(
    config: Mapping[str, Any], spelling: Spelling, dtype: np.dtype[Any], seed: int = 0
) -> Checkpoint:
    """A checkpoint with random weights for every parameter of ``config``'s model.

    Args:
        config: config.json.
        spelling: How to spell names and order axes.
        dtype: Of the weights.
        seed: Of the random numbers.
    """
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for parameter in read_model(config, families()).parameters():
        shape = parameter.shape(spelling.layout)
        matrix = len(shape) > 1
        for short, _ in parameter.parts(spelling.layout):
            values = random.normal(0.0 if matrix else 0.8, 0.1, shape)
            tensors[spelling.prefix + short] = ArrayTensor(values.astype(dtype))
    return Checkpoint(tensors, config=config)


def random_factors(
    model: Model, spelling: Spelling, rank: int, dtype: np.dtype[Any], seed: int = 0
) -> Checkpoint:
    """LoRA factors ``*_lora_a`` (\\*inputs, r) and ``*_lora_b`` (r, \\*outputs) for every matrix.

    Args:
        model: The base.
        spelling: How to spell names and order axes.
        rank: r.
        dtype: Of the factors.
        seed: Of the random numbers.
    """
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for parameter in model.parameters():
        row, sizes = parameter.row, parameter.sizes
        inputs, outputs = row.factor_axes(spelling.layout)
        a_shape = (*(sizes[axis] for axis in inputs), rank)
        b_shape = (rank, *(sizes[axis] for axis in outputs))
        for short, _ in parameter.parts(spelling.layout) if row.is_product else ():
            for side, shape in (("a", a_shape), ("b", b_shape)):
                values = random.normal(0.0, 0.1, shape).astype(dtype)
                tensors[f"{spelling.prefix}{short}_lora_{side}"] = ArrayTensor(values)
    return Checkpoint(tensors)
