"""Write a checkpoint as safetensors shards with an index, block by block.

The format is written here because the library's writer wants all tensors of a file in memory
(its 0.8.0 also scrambles arrays that are not contiguous). Every byte that was written is read back
and compared, and the library must find each tensor's name, dtype, shape and ends where they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemma_convert.convert import dtypes
from gemma_convert.convert.read_ahead import WORKERS, read_ahead
from gemma_convert.convert.tensor import Tensor
from gemma_convert.convert.writers.check_shard import check_shard
from gemma_convert.convert.writers.checked_file import CheckedFile

DEFAULT_SHARD_BYTES = 5 * 10**9
INDEX_NAME = "model.safetensors.index.json"

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
        sha256: Of the whole file, as the Hub computes it, made of what was read back.
    """

    name: str
    nbytes: int
    sha256: str


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


def write_shard(
    directory: Path, shard: Shard, progress: Progress, *, threads: int = WORKERS
) -> Written:
    """Write one shard into ``directory``, read it back, and bring it to the disk.

    Args:
        directory: Where; there must be no file of that name.
        shard: What.
        progress: Called with the bytes of each block when it is written, and when it is compared.
        threads: How many read and compute.

    Raises:
        OutputError: If what is read back is not what was written. Then, as after any other error,
            the file is removed.
    """
    path = directory / shard.name
    with CheckedFile(path) as file:
        try:
            file.write("header", np.frombuffer(file_header(shard.tensors), np.uint8))
            for block in read_ahead(shard.tensors, threads=threads):
                file.write(block.name, block.data)
                progress(block.data.nbytes + file.compared())
            digest = file.finish()
            progress(file.compared())
            check_shard(path, shard.tensors)
        except BaseException:
            path.unlink()
            raise
        return Written(shard.name, file.size, digest)


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


def file_header(tensors: Mapping[str, Tensor]) -> bytes:
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
