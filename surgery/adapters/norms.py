"""How large the deltas of an adapter are, next to the weights that they change.

``||B.A||`` follows from the Gram matrices of the factors, r x r each, without the product:
``||B.A||^2 = trace((A.A^T)(B^T.B))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, prod, sqrt

import numpy as np

from gemma_convert.convert import pattern as patterns
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.layouts import Layout, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.pattern import Pattern
from gemma_convert.convert.relayout import Relaid, relayout
from gemma_convert.convert.repeats import Part
from gemma_convert.convert.stack import unstacked
from gemma_convert.convert.tensor import Array, Tensor, blocks, whole
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.forms import RANK
from gemma_convert.surgery.adapters.maxtext import unrolled
from gemma_convert.surgery.adapters.place import Placed, place


def relative_norms(
    adapter: Adapter, model: Model, weights: Checkpoint, spelling: Spelling
) -> dict[str, float]:
    """||scale * A.B|| / ||W|| of every pair of the text model, by weight name; Frobenius norms.

    A DoRA's is that of its product alone, without the magnitudes.

    Args:
        adapter: The adapter.
        model: The base's dimensions.
        weights: The base, spelled in ``spelling``; every weight with a pair is read once.
        spelling: How ``weights`` is spelled.

    Raises:
        AdapterError: If a pair does not fit the base.
    """
    adapter = unrolled(adapter, model)
    placed = place(adapter, model)
    needed = {
        spelling.prefix + short
        for p in placed.values()
        for short, _ in p.parameter.parts(spelling.layout)
    }
    some = {name: tensor for name, tensor in weights.items() if name in needed}
    if not some:
        return {}
    respelled = relayout(
        weights.replace(tensors=some), model, spelling, adapter.spelling, partial=True
    )
    base: Mapping[str, Tensor] = unstacked(respelled, model, adapter.spelling)
    found: dict[str, float] = {}
    for name, pair in placed.items():
        if name in base:
            size = _norm(base[name])
            scale = abs(pair.scale * adapter.weight)
            delta = scale * product_norm(pair, adapter.spelling.layout)
            found[name] = delta / size if size else inf
    return found


def product_norm(placed: Placed, layout: Layout) -> float:
    """||A.B|| of a pair, from its factors alone."""
    row, pair = placed.parameter.row, placed.pair
    factors = zip((pair.a, pair.b), pair.form.patterns(row, layout), strict=True)
    grams = [_gram(factor, pattern, row.stacked, placed.sizes) for factor, pattern in factors]
    # Rounding may leave the square of a tiny norm just below zero.
    return sqrt(max(0.0, float((grams[0] * grams[1]).sum())))


def _gram(
    factor: Tensor, pattern: Pattern, stacked: tuple[str, ...], sizes: Mapping[str, int]
) -> Array:
    """The products of a factor's ranks with each other, float64: (experts, r, r)."""
    rest = [axis for axis in pattern.axes if axis not in (*stacked, RANK)]
    axes = patterns.parse(" ".join((*stacked, RANK, *rest)))
    values = Relaid([Part(factor, {})], pattern, axes, {}, sizes).read(whole(axes.shape(sizes)))
    count = prod(sizes[axis] for axis in stacked)
    matrix = values.astype(np.float64).reshape(count, sizes[RANK], -1)
    gram: Array = matrix @ matrix.transpose(0, 2, 1)
    return gram


def _norm(tensor: Tensor) -> float:
    squares = (np.square(tensor.read(b).astype(np.float64)).sum() for b in blocks(tensor))
    return sqrt(float(sum(squares)))
