"""Ask the safetensors library what it finds in a file that was written here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.tensor import Tensor, slices
from gemma_convert.convert.writers.checked_file import FAILING

_END = 1024
"""Elements compared at either end of a tensor, at most."""


def check_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Open a file with the library and see that every tensor lies where it was written.

    The tensors lie in order, one behind the other, up to the end of the file. The library must name
    the same ones with the same shapes and dtypes, and its first and last values of each must be the
    bytes that lie there.

    Raises:
        OutputError: If it does not.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            _compare(path, file, tensors)
    except SafetensorError as error:
        raise OutputError(f"{path}: cannot be read back: {error}", FAILING) from error


def _compare(path: Path, file: Any, tensors: Mapping[str, Tensor]) -> None:
    if set(file.keys()) != set(tensors):
        raise OutputError(f"{path}: read back with other tensors than were written", FAILING)
    position = path.stat().st_size - sum(tensor.nbytes for tensor in tensors.values())
    with path.open("rb") as raw:
        for name, tensor in tensors.items():
            view = file.get_slice(name)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if (shape, dtype) != (tensor.shape, dtypes.to_safetensors(tensor.dtype)):
                raise OutputError(f"{path}: {name}: read back as {dtype} {list(shape)}", FAILING)
            for offset, values in _ends(file, name, view, tensor):
                if os.pread(raw.fileno(), len(values), position + offset) != values:
                    raise OutputError(f"{path}: {name}: read back from another place", FAILING)
            position += tensor.nbytes


def _ends(file: Any, name: str, view: Any, tensor: Tensor) -> list[tuple[int, bytes]]:
    """First and last values of a tensor as the library reads them, each with its offset."""
    if not tensor.size:
        return []
    if not tensor.shape:
        return [(0, file.get_tensor(name).tobytes())]
    count = min(tensor.shape[-1], _END)
    head = tuple((0, 1) for _ in tensor.shape[:-1])
    tail = tuple((size - 1, size) for size in tensor.shape[:-1])
    first = view[slices((*head, (0, count)))]
    last = view[slices((*tail, (tensor.shape[-1] - count, tensor.shape[-1])))]
    begin = tensor.nbytes - count * tensor.dtype.itemsize
    return [
        (offset, np.ascontiguousarray(values).tobytes())
        for offset, values in ((0, first), (begin, last))
    ]
