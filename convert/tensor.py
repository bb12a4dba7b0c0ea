"""A tensor that has not been read yet, and the boxes by which it is read.

A `Box` is a tuple of ``(start, stop)``, one pair an axis, inside the tensor's shape. Every
operation on weights is a `Tensor` made of other tensors; nothing is read until a writer asks for
a box, so memory is bounded by the box and never by the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gemma_convert.convert import dtypes
from gemma_convert.convert.casting import all_finite, converted
from gemma_convert.convert.errors import OutputError

Array = npt.NDArray[Any]
Box = tuple[tuple[int, int], ...]

ACTIONS = ("copied", "rearranged", "filled", "cast", "computed", "merged")
"""What can happen to a tensor, the least first: bytes as they are, a permutation, values that no
source has, a rounding, other values for the same meaning, a sum."""

BLOCK_BYTES = 4 << 20
"""Default size of the blocks in which tensors are streamed: with what is computed from it, one
fits into a processor's cache."""


class Tensor(ABC):
    """One tensor not yet read.

    Attributes:
        shape: Its shape.
        dtype: Its numpy dtype (bfloat16 and float8 come from ml_dtypes).
    """

    action: ClassVar[str] = "copied"
    """What this step does to its parents' values, one of `ACTIONS`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abstractmethod
    def read(self, box: Box) -> Array:
        """Return the values inside ``box``: an array of the box's shape and this dtype."""

    @property
    def parents(self) -> tuple[Tensor, ...]:
        """The tensors that this one is computed from; empty for one that lies on a disk."""
        return ()

    def findings(self) -> dict[str, Any]:
        """What reading has told of this step alone so far, as JSON; empty if nothing is kept."""
        return {}

    def recall(self, findings: Mapping[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """Take over the `findings` of an earlier run, that read the whole tensor."""

    @property
    def wide(self) -> Tensor:
        """The same values before they are rounded to `dtype`; itself where none are rounded."""
        return self

    @property
    def stacked_axes(self) -> frozenset[int]:
        """Axes along which each index is read from a tensor of its own."""
        same = (parent for parent in self.parents if parent.shape == self.shape)
        return frozenset().union(*(parent.stacked_axes for parent in same))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes once written."""
        return self.size * self.dtype.itemsize

    def numpy(self) -> Array:
        """Read the whole tensor into memory. For small tensors and tests."""
        return self.read(whole(self.shape))


class ArrayTensor(Tensor):
    """A tensor whose values are in memory already."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def read(self, box: Box) -> Array:
        return self.array[slices(box)]


class Zeros(Tensor):
    """A tensor that no source has, all zero."""

    action = "filled"

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype

    def read(self, box: Box) -> Array:
        return np.zeros(extent(box), self.dtype)


class Cast(Tensor):
    """``parent`` in another dtype, each value rounded to nearest even."""

    action = "cast"

    def __init__(self, parent: Tensor, dtype: np.dtype[Any]) -> None:
        self.parent = parent
        self.shape = parent.shape
        self.dtype = np.dtype(dtype)

    @property
    def parents(self) -> tuple[Tensor, ...]:
        return (self.parent,)

    @property
    def wide(self) -> Tensor:
        return self.parent.wide

    def read(self, box: Box) -> Array:
        return rounded(self.parent.read(box), self.dtype)


def cast(tensor: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """``tensor`` in ``dtype``, rounded once to nearest even; itself if it has that dtype."""
    return tensor if tensor.dtype == dtype else Cast(tensor.wide, dtype)


def cast_floats(tensor: Tensor, dtype: np.dtype[Any] | None) -> Tensor:
    """``tensor`` in ``dtype`` if it holds floats and one is asked for."""
    if dtype is None or not dtypes.is_float(tensor.dtype):
        return tensor
    return cast(tensor, dtype)


def rounded(array: Array, dtype: np.dtype[Any]) -> Array:
    """``array`` in ``dtype``, to nearest even.

    Raises:
        OutputError: If a finite value becomes infinite or NaN, as one above 65504 in float16.
    """
    narrow = converted(array, dtype)
    if all_finite(narrow) or np.array_equal(np.isfinite(narrow), np.isfinite(array)):
        return narrow
    raise OutputError(
        f"a value as large as {np.abs(array[np.isfinite(array)]).max():.6g} does not fit {dtype}",
        "choose bfloat16 or float32 with --dtype",
    )


def ancestry(tensor: Tensor) -> Iterator[Tensor]:
    """``tensor``, its parents, their parents, and so on."""
    yield tensor
    for parent in tensor.parents:
        yield from ancestry(parent)


def all_findings(tensors: Mapping[str, Tensor]) -> dict[str, list[dict[str, Any]]]:
    """Names to the findings of a tensor's steps, where they are kept; for a journal."""
    found = {name: [step.findings() for step in ancestry(t)] for name, t in tensors.items()}
    return {name: steps for name, steps in found.items() if any(steps)}


def recall_all(
    tensors: Mapping[str, Tensor], findings: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Take over what `all_findings` told after an earlier run had read the same tensors."""
    for name, steps in findings.items():
        for step, found in zip(ancestry(tensors[name]), steps, strict=True):
            if found:
                step.recall(found)


def whole(shape: tuple[int, ...]) -> Box:
    """The box that covers all of ``shape``."""
    return tuple((0, size) for size in shape)


def slices(box: Box) -> tuple[slice, ...]:
    """``box`` as an index for numpy."""
    return tuple(slice(start, stop) for start, stop in box)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of ``box``."""
    return tuple(stop - start for start, stop in box)


def blocks(tensor: Tensor, block_bytes: int = BLOCK_BYTES) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``block_bytes``, in memory order.

    Each box is contiguous in the row-major tensor and each begins where the last one ended, so a
    writer can append them. A box holds at least one element of the last axis cut.
    """
    sizes = [prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
    limit = max(1, block_bytes // tensor.dtype.itemsize)
    # The first axis of which one index fits into a block; the axes before it are walked one by one.
    axis = next((a for a, size in enumerate(sizes) if size <= limit), len(sizes) - 1)
    if tensor.size == 0:
        return
    if not tensor.shape:
        yield ()
        return
    rows = max(1, limit // max(1, sizes[axis]))
    rest = whole(tensor.shape[axis + 1 :])
    for prefix in np.ndindex(tensor.shape[:axis]):
        head = tuple((index, index + 1) for index in prefix)
        for start in range(0, tensor.shape[axis], rows):
            yield (*head, (start, min(start + rows, tensor.shape[axis])), *rest)
