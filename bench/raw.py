"""tensorstore alone, the yardstick of Orbax: it reads, or writes, the same arrays and no more.

    python -m bench.raw read TREE
    python -m bench.raw write BASE OUT

Writing takes the tensors of a Hugging Face directory as they are, in no other order of axes, and
stores them as Orbax does: zarr, zstd, in an OCDBT store. Nothing is checked or read back.
"""

from __future__ import annotations

import argparse
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from gemma_convert.convert.readers.orbax import open_orbax
from gemma_convert.convert.readers.safetensors import open_safetensors
from gemma_convert.convert.writers.orbax_tree import CHUNK_BYTES

AT_ONCE = 256 << 20
"""Bytes of an array that are asked for at a time."""


def rows(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Leading rows of an array of ``shape``, `AT_ONCE` bytes each."""
    step = max(1, AT_ONCE // max(1, int(np.prod(shape[1:])) * itemsize)) if shape else 1
    yield from (slice(at, min(at + step, shape[0])) for at in range(0, shape[0], step))


def read(tree: Path) -> None:
    """Read every array of an Orbax tree."""
    for name, tensor in open_orbax(tree).items():
        store = _open(tree / "0" / "model_params", f"{name}.value").result()
        for part in rows(tensor.shape, tensor.dtype.itemsize):
            store[part].read().result()


def write(base: Path, out: Path) -> None:
    """Write every tensor of a Hugging Face directory as an array, and bring them to the disk."""
    out.mkdir()
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    for name, tensor in open_safetensors(base).items():
        row = int(np.prod(tensor.shape[1:])) * tensor.dtype.itemsize
        chunk = [max(1, min(tensor.shape[0], CHUNK_BYTES // row)), *tensor.shape[1:]]
        metadata = {"shape": tensor.shape, "chunks": chunk, "compressor": {"id": "zstd"}}
        store = _open(out, name, context=context, create=True, metadata=metadata, dtype="bfloat16")
        values = _mapped(tensor)
        for part in rows(tensor.shape, tensor.dtype.itemsize):
            store.result()[part].write(values[part]).result()
    os.sync()


def _open(directory: Path, name: str, context: Any = None, **spec: Any) -> Any:
    base = {"driver": "file", "path": f"{directory.resolve()}/"}
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": store, "open": True, **spec}, context=context)


def _mapped(tensor: Any) -> Any:
    """A safetensors tensor as an array over its file."""
    with tensor.path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(content, tensor.dtype, tensor.size, tensor.offset).reshape(tensor.shape)


def main() -> None:
    """Read or write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("read", "write"))
    parser.add_argument("paths", type=Path, nargs="+")
    options = parser.parse_args()
    {"read": read, "write": write}[options.what](*options.paths)


if __name__ == "__main__":
    main()
