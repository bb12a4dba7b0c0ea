"""One array of an Orbax checkpoint, read box by box through tensorstore.

A chunk is what tensorstore decodes at once, and by default Orbax writes one chunk a shard: on one
device, the whole array. Two things keep that affordable:

- Decoded chunks stay in a cache, so that the blocks of an array, read one after the other, decode
  each chunk once and not once a block. All arrays of a checkpoint share one cache; it holds the
  largest chunk among them, or `CACHE_BYTES` if that is more, and forgets the least recently used.
- A box that touches many chunks is cut along them and read piece by piece, so that no more than
  about that much is being decoded at a time, whatever the number of cores.

So reading takes the memory of the box, of the cache, and of the chunks of one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.tensor import Array, Box, Tensor, extent, slices

CACHE_BYTES = 288 << 20
"""Least size of a checkpoint's cache of decoded chunks, in bytes.

Another layout reads the columns of some matrices: a little of many chunks, again and again. The
largest matrix in a layer of Gemma 4 31B, of 231 MB, fits with all its chunks.
"""

_PIECE_BYTES = 64 << 20
"""Most bytes that a thread decodes at a time, unless one chunk is larger."""

_SLACK_BYTES = 8 << 20
"""Room in the cache for OCDBT's own nodes beside the chunks."""


class ChunkCache:
    """The cache of decoded chunks that the arrays of one checkpoint share."""

    def __init__(self) -> None:
        self.limit = CACHE_BYTES
        self.piece = _PIECE_BYTES
        self._context: Any = None
        self._lock = Lock()

    def fit(self, chunk_bytes: int) -> None:
        """Make room for a chunk of this size. Only before the first read."""
        self.limit = max(self.limit, chunk_bytes)

    def context(self) -> Any:
        """The tensorstore context with this cache."""
        import tensorstore as ts

        with self._lock:
            if self._context is None:
                pool = {"total_bytes_limit": self.limit + _SLACK_BYTES}
                self._context = ts.Context({"cache_pool": pool})
            return self._context


class OrbaxTensor(Tensor):
    """An array in an Orbax checkpoint.

    Attributes:
        name: What it is called on the disk.
        path: The directory of the tree that holds it.
        chunk: The shape of its chunks. Boxes that follow them are read fastest.
    """

    def __init__(self, name: str, path: Path, store: Any, cache: ChunkCache) -> None:
        self.name = name
        self.path = path
        self.shape = tuple(store.shape)
        self.dtype = np.dtype(store.dtype.numpy_dtype)
        chunk = store.chunk_layout.read_chunk.shape or self.shape
        self.chunk = tuple(max(1, min(c, s)) for c, s in zip(chunk, self.shape, strict=True))
        self._spec = store.spec()
        self._cache = cache
        self._store: Any = None
        cache.fit(self.chunk_bytes)

    def __repr__(self) -> str:
        return f"OrbaxTensor({self.name!r}, {self.shape}, {self.dtype}, {str(self.path)!r})"

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk once decoded."""
        return int(prod(self.chunk) * self.dtype.itemsize)

    def read(self, box: Box) -> Array:
        """The values in ``box``, a new C-contiguous array.

        Raises:
            InputError: The data are damaged or gone.
            IndexError: A box outside the shape.
        """
        if len(box) != len(self.shape) or not all(
            0 <= start <= stop <= size for (start, stop), size in zip(box, self.shape, strict=True)
        ):
            raise IndexError(f"box {box} is not inside shape {self.shape}")
        pieces = list(along_chunks(box, self.chunk, self._chunks_at_once()))
        if len(pieces) == 1:
            return self._read_piece(box)
        array = np.empty(extent(box), self.dtype)
        for piece in pieces:
            inner = tuple(
                slice(start - origin, stop - origin)
                for (start, stop), (origin, _) in zip(piece, box, strict=True)
            )
            array[inner] = self._read_piece(piece)
        return array

    def _chunks_at_once(self) -> int:
        return max(1, self._cache.piece // max(1, self.chunk_bytes))

    def _read_piece(self, box: Box) -> Array:
        try:
            if self._store is None:
                self._store = _open_again(self._spec, self._cache)
            values = self._store[slices(box)].read(order="C").result()
        except Exception as error:  # tensorstore raises ValueError, OSError and others
            raise damaged(self.name, self.path, error) from error
        return np.ascontiguousarray(values).reshape(extent(box))


def damaged(name: str, path: Path, error: Exception) -> InputError:
    """The error for an array that cannot be read, with the gist of what tensorstore says."""
    gist = str(error).split(" [")[0].split("\n")[0]
    return InputError(
        f"tensor {name!r} in {path} cannot be read: {gist}",
        "copy the checkpoint again, or use another step",
    )


def along_chunks(box: Box, chunk: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Cut ``box`` at chunk borders into boxes that each touch at most ``limit`` chunks.

    Args:
        box: The box to cut.
        chunk: The chunk's size along each axis; chunks begin at 0.
        limit: At least 1.
    """
    counts = [
        (stop - 1) // size - start // size + 1 if stop > start else 0
        for (start, stop), size in zip(box, chunk, strict=True)
    ]
    if prod(counts) <= limit:
        yield box
        return
    axis = max(range(len(counts)), key=counts.__getitem__)
    start, stop = box[axis]
    middle = (start // chunk[axis] + counts[axis] // 2) * chunk[axis]
    for part in ((start, middle), (middle, stop)):
        yield from along_chunks((*box[:axis], part, *box[axis + 1 :]), chunk, limit)


def _open_again(spec: Any, cache: ChunkCache) -> Any:
    """Open an array anew, now with the cache, whose size was not known before all were open."""
    import tensorstore as ts

    return ts.open(spec, open=True, read=True, context=cache.context()).result()
