"""A tensor inside a safetensors object of a bucket, read by ranges of bytes.

A box of whole rows is one range. Any other box of a large tensor would be thousands, so the tensor
is then fetched once into a temporary file and read from there; the files of the last few tensors
are kept, as many as the tensors that are stacked or split together.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from io import BufferedReader
from pathlib import Path
from threading import Lock

import numpy as np

from gemma_convert.convert.bucket.objects import BucketPath, Objects
from gemma_convert.convert.readers.safetensors_tensor import SafetensorsTensor, runs
from gemma_convert.convert.tensor import Array, Box, Tensor, extent, slices

_RANGE_BYTES = 32 << 20
"""Most bytes asked for at once, and the size up to which a tensor is fetched whole."""

_KEPT = 4
"""Tensors whose bytes are kept in temporary files."""


class Spool:
    """Temporary files that hold whole tensors, the most recent few."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: OrderedDict[str, Path] = OrderedDict()
        self._lock = Lock()

    def open(self, tensor: RangeTensor) -> BufferedReader:
        """The file with all of the tensor's bytes, open; fetched if it is not there.

        It stays readable when another tensor's takes its place.
        """
        with self._lock:
            if tensor.name not in self._files:
                while len(self._files) >= _KEPT:
                    self._files.popitem(last=False)[1].unlink()
                self._files[tensor.name] = self._fetch(tensor)
            self._files.move_to_end(tensor.name)
            return self._files[tensor.name].open("rb")

    def _fetch(self, tensor: RangeTensor) -> Path:
        with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
            for start in range(0, tensor.nbytes, _RANGE_BYTES):
                file.write(tensor.fetch(start, min(start + _RANGE_BYTES, tensor.nbytes)))
        return Path(file.name)


class RangeTensor(Tensor):
    """A tensor of a safetensors object.

    Attributes:
        name: Its name.
        path: The object.
        offset: Its first byte there.
    """

    def __init__(
        self,
        local: SafetensorsTensor,
        path: BucketPath,
        generation: str,
        objects: Objects,
        spool: Spool,
    ) -> None:
        self.name = local.name
        self.shape, self.dtype, self.offset = local.shape, local.dtype, local.offset
        self.path = path
        self._generation = generation
        self._objects = objects
        self._spool = spool

    def __repr__(self) -> str:
        return f"RangeTensor({self.name!r}, {self.shape}, {self.dtype}, {str(self.path)!r})"

    def fetch(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of the tensor."""
        first = self.offset
        return self._objects.read(self.path, first + start, first + stop, self._generation)

    def read(self, box: Box) -> Array:
        """The values in ``box``, a new C-contiguous array.

        Raises:
            InputError: The object was replaced since it was opened.
            RemoteError: It cannot be read.
        """
        array = np.empty(extent(box), self.dtype)
        if not array.size:
            return array
        run_bytes, starts = runs(box, self.shape, self.dtype.itemsize)
        target = array.reshape(-1).view(np.uint8).data
        if run_bytes == array.nbytes:
            first = next(starts)
            for at in range(0, run_bytes, _RANGE_BYTES):
                stop = min(at + _RANGE_BYTES, run_bytes)
                target[at:stop] = self.fetch(first + at, first + stop)
        elif self.nbytes <= _RANGE_BYTES:
            every = np.frombuffer(self.fetch(0, self.nbytes), self.dtype).reshape(self.shape)
            array[...] = every[slices(box)]
        else:
            with self._spool.open(self) as file:
                for index, start in enumerate(starts):
                    file.seek(start)
                    file.readinto(target[index * run_bytes : (index + 1) * run_bytes])
        return array
