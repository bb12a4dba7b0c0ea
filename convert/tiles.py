"""Cut a tensor into tiles, which are cheap to read in any order of the axes.

Another layout wants the rows of what are columns here. Of chunks that hold whole rows it needs a
little of every one; of tiles about the square root of their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from gemma_convert.convert.tensor import Box, Tensor


def tile_shape(tensor: Tensor, most_bytes: int) -> tuple[int, ...]:
    """The shape of tiles of at most ``most_bytes`` (or one element).

    One index of the axes along which layers are stacked, since each is read from elsewhere; few of
    the other leading axes, and about a square of the last two.
    """
    limit = max(1, most_bytes // tensor.dtype.itemsize)
    axes = [axis for axis in range(len(tensor.shape)) if axis not in tensor.stacked_axes]
    sizes = [size if axis in axes else 1 for axis, size in enumerate(tensor.shape)]
    for axis in axes[:-2]:
        sizes[axis] = max(1, min(sizes[axis], limit * sizes[axis] // prod(sizes)))
    while prod(sizes) > limit:
        axis = max(axes[-2:], key=sizes.__getitem__)
        count = -(-tensor.shape[axis] // (sizes[axis] - 1))  # the next number of even parts
        sizes[axis] = -(-tensor.shape[axis] // count)
    return tuple(sizes)


def tiles(tensor: Tensor, most_bytes: int) -> Iterator[Box]:
    """Every tile of `tile_shape`."""
    return grid(tensor.shape, tile_shape(tensor, most_bytes))


def grid(shape: tuple[int, ...], tile: tuple[int, ...]) -> Iterator[Box]:
    """Boxes of the shape ``tile`` that cover ``shape``, in row-major order.

    The last ones of an axis may be short.
    """
    yield from product(
        *(
            [(start, min(start + step, size)) for start in range(0, size, step)]
            for size, step in zip(shape, tile, strict=True)
        )
    )
