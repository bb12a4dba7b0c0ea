"""Read an Orbax checkpoint back and compare it with the checksums of what was written."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.read_ahead import Block, read_ahead
from gemma_convert.convert.readers.orbax import VALUE_SUFFIX, open_orbax
from gemma_convert.convert.readers.orbax_tensor import OrbaxTensor
from gemma_convert.convert.tensor import Box, Tensor
from gemma_convert.convert.tiles import grid
from gemma_convert.convert.writers.checked_file import FAILING
from gemma_convert.convert.writers.orbax_tree import TreeForm


def fold(total: int, block: Block) -> int:
    """The checksum of a tensor, from that of its blocks so far and the next one."""
    return zlib.crc32(block.data.data, total)


def verify_orbax(
    checkpoint: Checkpoint,
    directory: Path,
    sums: Mapping[str, int],
    *,
    form: TreeForm,
    progress: Callable[[int], None],
) -> None:
    """Open what `write_orbax` wrote with tensorstore and compare every value.

    Args:
        checkpoint: What was written; its values are not computed again.
        directory: Where.
        sums: What `write_orbax` returned.
        form: How it was written.
        progress: Told the number of bytes of each block compared.

    Raises:
        OutputError: If names, shapes, dtypes or values differ.
    """
    found = open_orbax(directory)
    stored = {name: ".".join(form.keys(name)).removesuffix(VALUE_SUFFIX) for name in checkpoint}
    if set(found) != set(stored.values()):
        raise OutputError(f"{directory}: read back with other tensors than were written", FAILING)
    for name, tensor in checkpoint.items():
        other = found[stored[name]]
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            what = f"{directory}: {name}: read back as {other.dtype} {other.shape}"
            raise OutputError(what, FAILING)
    totals = dict.fromkeys(checkpoint, 0)
    for block in read_ahead({name: found[stored[name]] for name in checkpoint}, cut=_by_chunks):
        totals[block.name] = fold(totals[block.name], block)
        progress(block.array.nbytes)
    for name, total in totals.items():
        if total != sums[name]:
            raise OutputError(
                f"{directory}: {name}: the values read back differ from those written", FAILING
            )


def _by_chunks(tensor: Tensor, most_bytes: int) -> Iterator[Box]:
    """The chunks that were written, in the order in which they were."""
    assert isinstance(tensor, OrbaxTensor)
    return grid(tensor.shape, tensor.chunk)
