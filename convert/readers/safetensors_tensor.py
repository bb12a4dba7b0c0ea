"""One tensor inside a safetensors file, read box by box with ``preadv``.

Not with mmap: mapped pages count as the process's memory, and touching a page of a file that was
cut short kills the process. The file is opened for each read and closed after it: a few
microseconds against megabytes read, and in return no descriptor is held or leaked however many
shards a model has, threads share nothing, and a file changed meanwhile is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.regular_file import open_descriptor
from gemma_convert.convert.readers.safetensors_header import Entry, Header
from gemma_convert.convert.tensor import Array, Box, Tensor, extent


class SafetensorsTensor(Tensor):
    """A tensor in a safetensors file.

    Attributes:
        path: The file.
        offset: The tensor's first byte in it; its `nbytes` bytes from there are the whole tensor,
            row-major, so that a writer can copy them without decoding.
    """

    def __init__(self, name: str, entry: Entry, path: Path, header: Header) -> None:
        self.name = name
        self.path = path
        self.offset = entry.begin
        self.shape = entry.shape
        self.dtype = entry.dtype
        self._size = header.size
        self._mtime_ns = header.mtime_ns

    def __repr__(self) -> str:
        return f"SafetensorsTensor({self.name!r}, {self.shape}, {self.dtype}, {str(self.path)!r})"

    def read(self, box: Box) -> Array:
        """The values in ``box``, a new C-contiguous array: one ``preadv`` a contiguous run.

        Raises:
            InputError: The file is gone, changed since it was opened, or shorter than its header
                says.
            ValueError: A box outside the shape.
        """
        _check_inside(box, self.shape)
        array = np.empty(extent(box), self.dtype)
        if not array.size:
            return array
        target = array.reshape(-1).view(np.uint8).data
        try:
            descriptor = open_descriptor(self.path)
        except OSError as error:
            raise self._unreadable(f"cannot be read: {error.strerror}") from error
        try:
            stat = os.fstat(descriptor)
            if (stat.st_size, stat.st_mtime_ns) != (self._size, self._mtime_ns):
                raise self._unreadable("was changed while it was being read")
            run_bytes, starts = runs(box, self.shape, self.dtype.itemsize)
            for index, start in enumerate(starts):
                run = target[index * run_bytes : (index + 1) * run_bytes]
                self._fill(descriptor, run, self.offset + start)
        finally:
            os.close(descriptor)
        return array

    def _fill(self, descriptor: int, target: memoryview, position: int) -> None:
        """Read into all of ``target``: the kernel gives at most 2 GiB a call."""
        while target:
            try:
                count = os.preadv(descriptor, [target], position)
            except OSError as error:
                raise self._unreadable(f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise self._unreadable(f"ends at byte {position}, {len(target)} bytes too early")
            target, position = target[count:], position + count

    def _unreadable(self, why: str) -> InputError:
        return InputError(
            f"tensor {self.name!r}: {self.path} {why}",
            "let no other program touch the file, download it again, and start over",
        )


def runs(box: Box, shape: tuple[int, ...], itemsize: int) -> tuple[int, Iterator[int]]:
    """Where the bytes of a box lie in a row-major tensor of ``shape``.

    Returns:
        The bytes of a run (all are equal), and the first byte of each, in the box's own order.
    """
    sizes = extent(box)
    # Trailing axes that are read whole join the run, and so does the one axis before them.
    axis = len(shape)
    while axis and sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(axis - 1, 0)
    strides = [itemsize * prod(shape[a + 1 :]) for a in range(len(shape))]
    base = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    starts = (
        base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        for index in np.ndindex(sizes[:axis])
    )
    return itemsize * prod(sizes[axis:]), starts


def _check_inside(box: Box, shape: tuple[int, ...]) -> None:
    inside = len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"box {box} is not inside shape {shape}")
