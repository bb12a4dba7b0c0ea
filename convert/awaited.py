"""Tensors whose files come when they are needed: a base of 62 GB is not fetched for its config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.safetensors_header import Header, read_header
from gemma_convert.convert.readers.safetensors_tensor import SafetensorsTensor
from gemma_convert.convert.tensor import Array, Box, Tensor, ancestry


class Shards:
    """Safetensors files that lie elsewhere, and the directory into which they are fetched.

    Args:
        fetch: Brings files, named, into a directory and returns it; those that are there already
            are not fetched again.
    """

    def __init__(self, fetch: Callable[[Iterable[str]], Path]) -> None:
        self._fetch = fetch
        self._headers: dict[str, tuple[Path, Header]] = {}
        self._lock = Lock()

    def bring(self, names: Iterable[str]) -> None:
        """Fetch those that have not come yet, all at once.

        Raises:
            RemoteError: They cannot be fetched.
        """
        with self._lock:
            missing = sorted({*names} - self._headers.keys())
            if missing:
                directory = self._fetch(missing)
                for name in missing:
                    self._headers[name] = (directory / name, read_header(directory / name))

    def tensor(self, head: SafetensorsTensor) -> SafetensorsTensor:
        """The tensor of which ``head`` is known, in its file that has come.

        Raises:
            InputError: The file is another one than its header promised.
        """
        self.bring([head.path.name])
        path, header = self._headers[head.path.name]
        entry = header.entries.get(head.name)
        planned = (head.dtype, head.shape, head.offset)
        if entry is None or (entry.dtype, entry.shape, entry.begin) != planned:
            raise InputError(
                f"tensor {head.name!r}: {path} is not the file whose header came first: expected "
                f"{head.dtype} {list(head.shape)} at byte {head.offset}, found "
                + (f"{entry.dtype} {list(entry.shape)} at {entry.begin}" if entry else "none"),
                "delete the file from the cache, and run again",
            )
        return SafetensorsTensor(head.name, entry, path, header)


class Awaited(Tensor):
    """A tensor known by its file's header; the file comes when the first value is read.

    Attributes:
        file: Its name.
        shards: Where it comes from.
    """

    def __init__(self, head: SafetensorsTensor, shards: Shards) -> None:
        self.name, self.shape, self.dtype = head.name, head.shape, head.dtype
        self.file = head.path.name
        self.shards = shards
        self._head = head

    def __repr__(self) -> str:
        return f"Awaited({self.name!r}, {self.shape}, {self.dtype}, {self.file!r})"

    def read(self, box: Box) -> Array:
        """The values in ``box``, a new C-contiguous array.

        Raises:
            RemoteError: The file cannot be fetched.
            InputError: See `Shards.tensor` and `SafetensorsTensor.read`.
        """
        return self.shards.tensor(self._head).read(box)


def bring(tensors: Mapping[str, Tensor]) -> None:
    """Fetch every file that reading ``tensors`` needs, which is faster than one after the other.

    Raises:
        RemoteError: They cannot be fetched.
    """
    wanted: dict[Shards, set[str]] = {}
    for tensor in tensors.values():
        for step in ancestry(tensor):
            if isinstance(step, Awaited):
                wanted.setdefault(step.shards, set()).add(step.file)
    for shards, files in wanted.items():
        shards.bring(files)
