"""Write a checkpoint as safetensors shards with an index, block by block.

The format is written here because the library's writer wants all tensors of a file in memory
(its 0.8.0 also scrambles arrays that are not contiguous). What was written is then read back
with the library and compared.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.read_ahead import read_ahead
from gemma_convert.convert.tensor import Tensor, blocks, extent, slices

DEFAULT_SHARD_BYTES = 5 * 10**9
INDEX_NAME = "model.safetensors.index.json"
_FAILING = "the disk or its file system is failing; nothing was kept"

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Shard:
    """One file: its name and its tensors, in the order in which they are written."""

    name: str
    tensors: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Written:
    """What a shard became.

    Attributes:
        name: File name.
        nbytes: Size of the file.
        sha256: Of the whole file, as the Hub computes it.
        tensors: Name to the CRC-32 of the tensor's bytes, to find one that reads back wrong.
    """

    name: str
    nbytes: int
    sha256: str
    tensors: Mapping[str, int]


def shard(tensors: Mapping[str, Tensor], max_bytes: int = DEFAULT_SHARD_BYTES) -> list[Shard]:
    """Distribute tensors over files of at most ``max_bytes`` each, in order.

    A tensor larger than that gets a file of its own. Inside a file the widest dtypes come first,
    so that every tensor is aligned to its item size. One file is named ``model.safetensors``,
    several ``model-00001-of-00003.safetensors``, as transformers does.
    """
    groups: list[dict[str, Tensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        if groups[-1] and tensor.nbytes > room:
            groups.append({})
            room = max_bytes
        groups[-1][name] = tensor
        room -= tensor.nbytes
    files = [dict(sorted(g.items(), key=lambda item: -item[1].dtype.itemsize)) for g in groups]
    if len(files) == 1:
        return [Shard("model.safetensors", files[0])]
    return [
        Shard(f"model-{i:05d}-of-{len(files):05d}.safetensors", file)
        for i, file in enumerate(files, 1)
    ]


def write_shard(directory: Path, shard: Shard, progress: Progress) -> Written:
    """Write one shard into ``directory``.

    Args:
        directory: Where.
        shard: What.
        progress: Called with the number of bytes of each block written.
    """
    header = _header(shard.tensors)
    whole = hashlib.sha256(header)
    sums = dict.fromkeys(shard.tensors, 0)
    with (directory / shard.name).open("xb") as file:
        file.write(header)
        for name, array in read_ahead(shard.tensors):
            # A transposed view would be written in the wrong order.
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.write(data)
            whole.update(data)
            sums[name] = zlib.crc32(data, sums[name])
            progress(data.nbytes)
    nbytes = len(header) + shard.nbytes
    return Written(shard.name, nbytes, whole.hexdigest(), sums)


def write_index(directory: Path, shards: list[Shard]) -> None:
    """Write the index of several shards; a single file needs none."""
    if len(shards) == 1:
        return
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {name: shard.name for shard in shards for name in shard.tensors},
    }
    text = json.dumps(index, indent=2) + "\n"
    (directory / INDEX_NAME).write_text(text, encoding="utf-8")


def verify_shard(directory: Path, shard: Shard, written: Written, progress: Progress) -> None:
    """Read a shard back with the safetensors library and compare it with what was meant.

    The file is opened anew for each block, since the library maps it and every mapped page read
    would stay in memory.

    Raises:
        OutputError: If names, shapes, dtypes or values differ.
    """
    from safetensors import safe_open

    path = directory / shard.name
    found = _described(path)
    if found.keys() != shard.tensors.keys():
        raise OutputError(f"{path}: read back with other tensors than were written", _FAILING)
    for name, tensor in shard.tensors.items():
        shape, dtype = found[name]
        if (shape, dtype) != (tensor.shape, dtypes.to_safetensors(tensor.dtype)):
            raise OutputError(f"{path}: {name}: read back as {dtype} {list(shape)}", _FAILING)
        total = 0
        for box in blocks(tensor):
            with safe_open(path, framework="numpy") as file:
                data = file.get_slice(name)[slices(box)] if box else file.get_tensor(name)
            data = np.ascontiguousarray(data).reshape(extent(box))
            total = zlib.crc32(data.reshape(-1).view(np.uint8).data, total)
            progress(data.nbytes)
        if total != written.tensors[name]:
            raise OutputError(
                f"{path}: {name}: the values read back differ from those written", _FAILING
            )


def _described(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to shape and dtype of every tensor, as the safetensors library reads the header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: (tuple(view.get_shape()), view.get_dtype()) for n, view in views.items()}
    except SafetensorError as error:
        raise OutputError(f"{path}: cannot be read back: {error}", _FAILING) from error


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """The file's beginning: length, then names, dtypes, shapes and offsets as JSON."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": dtypes.to_safetensors(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return struct.pack("<Q", len(text)) + text
