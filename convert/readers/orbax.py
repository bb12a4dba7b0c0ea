"""Open Orbax checkpoints without jax or orbax: ``_METADATA`` for the names, tensorstore for arrays.

So a checkpoint opens anywhere, whatever devices it was saved on. Arrays keep the names they have on
the disk, the tree's keys joined with dots. Where every name ends in ``.value``, as flax's nnx
writes them, that ending is removed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.digests import stamp
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import read_bytes, read_object
from gemma_convert.convert.readers.links import check_files
from gemma_convert.convert.readers.names import in_natural_order
from gemma_convert.convert.readers.orbax_metadata import (
    ARRAYS,
    NOT_ON_DISK,
    OCDBT_MANIFEST,
    Leaf,
    TreeMetadata,
    custom_metadata,
    read_tree_metadata,
)
from gemma_convert.convert.readers.orbax_steps import STEP_FILE, TREE_FILE, Location, find_tree
from gemma_convert.convert.readers.orbax_tensor import (
    CACHE_BYTES,
    ChunkCache,
    OrbaxTensor,
    damaged,
)
from gemma_convert.convert.readers.provenance import with_provenance
from gemma_convert.convert.readers.safetensors import ADAPTER_CONFIG_NAME

VALUE_SUFFIX = ".value"

KvStore = Callable[[Path], Mapping[str, Any]]

_OTHER = "copy the checkpoint again, or use another step"

_AT_ONCE = 64
"""Arrays that are being opened at a time."""


def local_store(tree: Path) -> dict[str, Any]:
    """Where a tree's arrays lie, as tensorstore's key-value stores are written."""
    return {"driver": "file", "path": f"{tree.resolve()}/"}


def open_orbax(
    path: Path,
    step: int | None = None,
    item: str | None = None,
    *,
    kvstore: KvStore = local_store,
) -> Checkpoint:
    """Open a checkpoint's root, one of its steps, an item of a step, or a tree alone.

    The checkpoint's ``metadata`` holds ``custom_metadata`` (of the tree, then of the step),
    ``step``, ``item``, ``items``, ``steps`` and ``tree_value_suffix``: whether ``.value`` was
    removed from all names; and ``beside``, the adapter_config.json that MaxText keeps in the root
    of an adapter, where there is one.

    Args:
        path: The directory.
        step: The step wanted; by default a root's newest finished one.
        item: The item wanted; by default ``model_params``, else the one item that holds weights.
        kvstore: Gives the store that holds the arrays of a tree, where that is not the directory
            with its metadata.

    Raises:
        InputError: Anything unfinished, missing, ambiguous or damaged, a link out of the tree.
    """
    location = find_tree(path, step, item)
    check_files(location.tree)
    tree = read_tree_metadata(location.tree)
    dropped = {
        leaf.name: NOT_ON_DISK[leaf.kind] for leaf in tree.leaves if leaf.kind in NOT_ON_DISK
    }
    leaves = [leaf for leaf in tree.leaves if leaf.name not in dropped]
    arrays = _open_arrays(location.tree, tree, leaves, kvstore(location.tree))
    dropped |= {
        leaf.name: f"it is a {leaf.kind} without an array on the disk"
        for leaf in leaves
        if leaf.name not in arrays
    }
    suffix = bool(arrays) and all(name.endswith(VALUE_SUFFIX) for name in arrays)
    if suffix:
        arrays = {name.removesuffix(VALUE_SUFFIX): array for name, array in arrays.items()}
    checkpoint = Checkpoint(
        tensors=in_natural_order(arrays),
        source=str(location.tree),
        format="orbax",
        metadata=_metadata(location, tree, suffix),
        dropped=dropped,
        notes=location.notes,
        fingerprint=_fingerprint(location),
    )
    return with_provenance(checkpoint, location.tree, *location.tree.resolve().parents[:2])


def _open_arrays(
    tree: Path, metadata: TreeMetadata, leaves: list[Leaf], base: Mapping[str, Any]
) -> dict[str, OrbaxTensor]:
    """Open the leaves' arrays, many at a time; those that need none on the disk may be absent."""
    cache = ChunkCache()
    arrays: dict[str, OrbaxTensor] = {}
    for start in range(0, len(leaves), _AT_ONCE):
        batch = leaves[start : start + _AT_ONCE]
        futures = [_open(base, metadata, leaf) for leaf in batch]
        for leaf, future in zip(batch, futures, strict=True):
            try:
                store = future.result()
            except Exception as error:  # tensorstore raises ValueError, OSError and others
                if "NOT_FOUND" not in str(error):
                    raise damaged(leaf.name, tree, error) from error
                if leaf.kind in ARRAYS:
                    raise InputError(
                        f"{tree / TREE_FILE} names the tensor {leaf.name!r}, which is not on the "
                        "disk",
                        "copy the checkpoint again: a part of it is missing",
                    ) from error
                continue
            _check_array(leaf.name, store, tree)
            arrays[leaf.name] = OrbaxTensor(leaf.name, tree, store, cache)
            _check_shape(leaf, arrays[leaf.name], tree)
    return arrays


def _open(base: Mapping[str, Any], metadata: TreeMetadata, leaf: Leaf) -> Any:
    """A tensorstore future of the leaf's array."""
    import tensorstore as ts

    store = (
        {"driver": "ocdbt", "base": base, "path": f"{leaf.name}/"}
        if metadata.ocdbt
        else {**base, "path": f"{base['path']}{leaf.name}/"}
    )
    spec = {
        "driver": "zarr3" if metadata.zarr3 else "zarr",
        "kvstore": store,
        # Else a chunk that is gone would read as zeros.
        "fill_missing_data_reads": not metadata.all_written,
        # A finished save does not change: a chunk in the cache need not be looked up again.
        "recheck_cached_data": False,
    }
    return ts.open(spec, open=True, read=True)


def _check_array(name: str, store: Any, tree: Path) -> None:
    """Refuse arrays of no numbers, and chunks that tensorstore could not hold: it would abort.

    Orbax cuts arrays into chunks, so a chunk is never larger than its array.
    """
    dtype = np.dtype(store.dtype.numpy_dtype)
    if dtype.kind in "OSU" or dtype.type is np.void:
        raise InputError(f"tensor {name!r} in {tree} holds {store.dtype.name}, no numbers", _OTHER)
    chunk = prod(store.chunk_layout.read_chunk.shape or store.shape) * dtype.itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if chunk > min(memory, max(2 * prod(store.shape) * dtype.itemsize, CACHE_BYTES)):
        raise InputError(
            f"tensor {name!r} in {tree} of shape {store.shape} has chunks of {chunk} bytes each",
            _OTHER + "; a sound one needs a machine with the memory for a chunk",
        )


def _check_shape(leaf: Leaf, array: OrbaxTensor, tree: Path) -> None:
    """The array must be a whole number of the shards that `TREE_FILE` says were written.

    Our own writer says the shape of its chunks there, and the last one may be short.
    """
    shard = leaf.write_shape
    if shard is None or tuple(shard) == array.chunk:
        return
    fits = len(shard) == len(array.shape) and all(
        part and size % part == 0 for part, size in zip(shard, array.shape, strict=True)
    )
    if not fits:
        raise InputError(
            f"tensor {leaf.name!r} in {tree} has shape {array.shape}, but {TREE_FILE} says it was "
            f"written in shards of {shard}",
            "the files of two saves are mixed: copy the checkpoint again",
        )


def _metadata(location: Location, tree: TreeMetadata, suffix: bool) -> dict[str, Any]:
    custom = dict(tree.custom)
    path = location.holder / STEP_FILE
    if path.is_file():
        custom.update(custom_metadata(read_object(path), path))
    beside = location.holder.resolve().parent / ADAPTER_CONFIG_NAME
    return {
        **({"beside": read_object(beside)} if beside.is_file() else {}),
        "custom_metadata": custom,
        "step": location.step,
        "item": location.item,
        "items": list(location.items),
        "steps": list(location.steps),
        "tree_value_suffix": suffix,
    }


def _fingerprint(location: Location) -> dict[str, str]:
    """sha256, size and stamp of the files that tell steps and trees.

    Under ``*`` number, size and newest stamp of all files in the tree: no data changes in place.
    """
    paths = [
        location.holder / STEP_FILE,
        location.tree / TREE_FILE,
        location.tree / OCDBT_MANIFEST,
    ]
    result = {}
    for path in paths:
        if path.is_file():
            digest, stat = hashlib.sha256(read_bytes(path)).hexdigest(), path.stat()
            result[path.name] = f"sha256:{digest} size:{stat.st_size} {stamp(stat)}"
    stats = [Path(folder, n).stat() for folder, _, names in os.walk(location.tree) for n in names]
    size = sum(stat.st_size for stat in stats)
    newest = max(stats, key=lambda stat: stat.st_ctime_ns)
    return {**result, "*": f"files:{len(stats)} size:{size} {stamp(newest)}"}
