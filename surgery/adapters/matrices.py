"""The factors of a pair as plain matrices, and such matrices as a pair again, without a model.

Whatever the form, A with its axes beside the rank joined is (r, inputs) and B is (outputs, r); so a
pair can be worked on where no config.json is at hand.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.tensor import Array, ArrayTensor, Tensor
from gemma_convert.surgery.adapters.adapter import Adapter, Pair


class Computed(ArrayTensor):
    """Values in memory that were computed from other tensors."""

    action = "computed"

    def __init__(self, array: Array, parents: tuple[Tensor, ...]) -> None:
        super().__init__(array)
        self._parents = parents

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return self._parents


def matrices(pair: Pair) -> tuple[Array, Array]:
    """A (r, inputs) and B (outputs, r) of ``pair``, float64."""
    a, b = (factor.numpy().astype(np.float64) for factor in (pair.a, pair.b))
    if pair.form.is_qwix:
        return a.reshape(-1, pair.rank).T, b.reshape(pair.rank, -1).T
    return a, b


def with_matrices(
    pair: Pair, a: Array, b: Array, dtype: np.dtype[np.generic], parents: tuple[Tensor, ...] = ()
) -> Pair:
    """``pair`` with other factors, of any rank.

    Args:
        pair: Gives the form and the sizes of the axes.
        a: (r, inputs).
        b: (outputs, r).
        dtype: To store them in; each value is rounded once.
        parents: What they were computed from; the factors of ``pair`` if empty.
    """
    if pair.form.is_qwix:
        a, b = a.T.reshape(*pair.a.shape[:-1], -1), b.T.reshape(-1, *pair.b.shape[1:])
    parents = parents or (pair.a, pair.b)
    tensors = [Computed(np.ascontiguousarray(array.astype(dtype)), parents) for array in (a, b)]
    return replace(pair, a=tensors[0], b=tensors[1])


def require_matrices(adapter: Adapter) -> None:
    """Refuse pairs that are not one plain matrix each, or that no adapter is written with.

    Raises:
        AdapterError: For factors of experts or of embeddings; it names the first.
    """
    for name, pair in adapter.pairs.items():
        what = "experts" if pair.experts > 1 or ".experts." in f".{name}." else ""
        what = "an embedding" if "embed_tokens" in name else what
        if what:
            raise AdapterError(
                f"{adapter.source}: {name}: factors of {what}, which cannot be written as an "
                "adapter here",
                "merge it: gemma-convert surgery merge-lora",
            )
