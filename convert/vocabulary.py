"""The rows of the embedding: their number differs between layouts of one model.

Gemma 1 and 2 have 256000 rows in Hugging Face and 256128 in JAX; the multimodal Gemma 3 has 262208
and 262144. No token uses the rows beyond the smaller number.
"""

from __future__ import annotations

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.layouts import LAYOUTS, Layout, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.tensor import Array, Box, Tensor, Zeros

EMBEDDING = "embedding"
"""Name of the row in every family."""


class Rows(Tensor):
    """The rows of ``head`` and, below them, those of ``tail`` from where ``head`` ended."""

    action = "rearranged"

    def __init__(self, head: Tensor, tail: Tensor) -> None:
        self.head = head
        self.tail = tail
        self.shape = (tail.shape[0], *head.shape[1:])
        self.dtype = head.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.head, self.tail)

    @property
    def wide(self) -> Tensor:
        return Rows(self.head.wide, self.tail)

    def read(self, box: Box) -> Array:
        (start, stop), *rest = box
        border = self.head.shape[0]
        parts: list[Array] = []
        if start < border:
            parts.append(self.head.read(((start, min(stop, border)), *rest)))
        if stop > border:
            lower = self.tail.read(((max(start, border), stop), *rest))
            parts.append(lower.astype(self.dtype))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class FirstRows(Tensor):
    """The first ``rows`` rows of a tensor."""

    action = "rearranged"

    def __init__(self, parent: Tensor, rows: int) -> None:
        self.parent = parent
        self.shape = (rows, *parent.shape[1:])
        self.dtype = parent.dtype

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.parent,)

    @property
    def wide(self) -> Tensor:
        return FirstRows(self.parent.wide, self.shape[0])

    def read(self, box: Box) -> Array:
        return self.parent.read(box)


def embedding_name(model: Model, spelling: Spelling) -> str:
    """How ``spelling`` names the embedding."""
    row = next(row for row in model.family.rows if row.name == EMBEDDING)
    return spelling.prefix + row.cell(spelling.layout).template.text


def vocabulary(model: Model, layout: Layout) -> int:
    """Rows of the embedding in ``layout``."""
    size = model.common.sizes["v"]
    return layout.vocabulary.get(size, size)


def as_stored(model: Model, checkpoint: Checkpoint, spelling: Spelling) -> Model:
    """``model`` with as many rows as ``checkpoint`` has, if that is a number known for it."""
    tensor = checkpoint.get(embedding_name(model, spelling))
    known = {vocabulary(model, layout) for layout in LAYOUTS.values()}
    if tensor is None or not tensor.shape or tensor.shape[0] not in known:
        return model
    return model.with_vocabulary(tensor.shape[0])


def fit_vocabulary(
    checkpoint: Checkpoint, model: Model, spelling: Spelling, base: Tensor | None = None
) -> Checkpoint:
    """Give the embedding of ``checkpoint`` the rows that ``spelling``'s layout wants.

    Args:
        checkpoint: Spelled in ``spelling``.
        model: By config.json.
        spelling: The layout.
        base: An embedding to take missing rows from; zeros if None or too short.

    Returns:
        The checkpoint, with a note of what was dropped or invented.
    """
    name = embedding_name(model, spelling)
    tensor = checkpoint[name]
    found, wanted = tensor.shape[0], vocabulary(model, spelling.layout)
    if found == wanted:
        return checkpoint
    if found > wanted:
        resized: Tensor = FirstRows(tensor, wanted)
        note = f"{name}: dropped rows {wanted} to {found - 1}, {_describe(tensor, wanted)}"
    else:
        has_rows = base is not None and base.shape == (wanted, *tensor.shape[1:])
        filler = base if base is not None and has_rows else _zeros(tensor, wanted)
        resized = Rows(tensor, filler)
        origin = "taken from the base" if has_rows else "invented: all zero"
        note = f"{name}: rows {found} to {wanted - 1} are {origin}; no token uses them"
    tensors = {**checkpoint.tensors, name: resized}
    return checkpoint.replace(tensors=tensors, notes=(*checkpoint.notes, note))


def with_rows(delta: Tensor, rows: int) -> Tensor:
    """What is added to an embedding of ``rows`` rows: nothing to those that ``delta`` lacks."""
    found = delta.shape[0]
    if found == rows:
        return delta
    return FirstRows(delta, rows) if found > rows else Rows(delta, _zeros(delta, rows))


def _zeros(tensor: Tensor, rows: int) -> Tensor:
    return Zeros((rows, *tensor.shape[1:]), tensor.dtype)


def _describe(tensor: Tensor, start: int) -> str:
    """What the rows from ``start`` on hold: they are read, since what is dropped must be known."""
    values = tensor.read(((start, tensor.shape[0]), (0, tensor.shape[1]))).astype(np.float32)
    if not values.any():
        return "all zero"
    return f"which no token uses (largest value {np.abs(values).max():.3g})"
