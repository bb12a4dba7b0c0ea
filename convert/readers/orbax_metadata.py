"""What an Orbax tree says about itself in ``_METADATA``, checked.

The file (orbax 0.12.8, _src/metadata/tree.py) is one JSON object. ``tree_metadata`` maps each
leaf to its keys, the type of its value and, for a jax.Array, ``write_shape``: the shape of the
shard that one host wrote, hence of a chunk, not of the array. The dtype is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.orbax_steps import TREE_FILE

OCDBT_MANIFEST = "manifest.ocdbt"

NOT_ON_DISK = {
    "None": "it is None",
    "Dict": "it is an empty dict",
    "List": "it is an empty list",
    "Tuple": "it is an empty tuple",
    "NamedTuple": "it is an empty named tuple",
    "string": "it is a string",
}
"""Types of leaves that Orbax keeps without an array, each with the reason it is dropped."""

ARRAYS = frozenset({"jax.Array", "np.ndarray"})
"""Types of leaves that must have an array on the disk."""

_COPY = "copy the checkpoint again"


@dataclass(frozen=True)
class Leaf:
    """One leaf of the tree.

    Attributes:
        keys: The path to it: attribute names, dict keys, list indices, all as strings.
        kind: The type of its value: ``jax.Array``, ``np.ndarray``, ``scalar``, ``None``, ...
        write_shape: The shape of a shard, where known.
    """

    keys: tuple[str, ...]
    kind: str
    write_shape: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """What the array is called on the disk."""
        return ".".join(self.keys)


@dataclass(frozen=True)
class TreeMetadata:
    """A checked ``_METADATA``.

    Attributes:
        leaves: The leaves, under unique names.
        ocdbt: Whether the arrays lie in an OCDBT database (else each in a directory).
        zarr3: Whether they are zarr version 3 (else 2).
        all_written: Whether chunks that hold only the fill value were written too, so that a
            missing chunk is damage and not a zero.
        custom: The custom metadata of the tree.
    """

    leaves: tuple[Leaf, ...]
    ocdbt: bool
    zarr3: bool
    all_written: bool
    custom: Mapping[str, Any] = field(default_factory=dict)


def read_tree_metadata(tree: Path) -> TreeMetadata:
    """Read ``tree / "_METADATA"``.

    Raises:
        InputError: Not what Orbax writes, a name that leaves the directory, two leaves of one name.
    """
    path = tree / TREE_FILE
    table = read_object(path)
    entries = table.get("tree_metadata")
    if not isinstance(entries, dict):
        raise InputError(f"{path} has no tree_metadata", _COPY)
    leaves = tuple(_leaf(key, value, path) for key, value in entries.items())
    _check_unique(leaves, path)
    ocdbt = table.get("use_ocdbt")
    manifest = (tree / OCDBT_MANIFEST).is_file()
    if ocdbt and not manifest:
        raise InputError(f"{tree} has no {OCDBT_MANIFEST}, which {TREE_FILE} announces", _COPY)
    return TreeMetadata(
        leaves=leaves,
        ocdbt=manifest if ocdbt is None else bool(ocdbt),
        zarr3=bool(table.get("use_zarr3")),
        all_written=bool(table.get("store_array_data_equal_to_fill_value")),
        custom=custom_metadata(table, path),
    )


def custom_metadata(table: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The custom_metadata of ``_METADATA`` or ``_CHECKPOINT_METADATA``; empty if none."""
    custom = table.get("custom_metadata") or {}
    if not isinstance(custom, dict):
        raise InputError(f"{path}: custom_metadata must be an object, found {custom!r}", _COPY)
    return custom


def _leaf(key: str, value: Any, path: Path) -> Leaf:
    def bad(why: str) -> InputError:
        return InputError(f"{path}: leaf {key!r} {why}", _COPY)

    if not isinstance(value, dict):
        raise bad("is no object")
    parts, about = value.get("key_metadata"), value.get("value_metadata")
    if not isinstance(parts, list) or not parts or not isinstance(about, dict):
        raise bad("needs key_metadata and value_metadata")
    keys = [part.get("key") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(k, str) or type(k) is int for k in keys):
        raise bad(f"has keys that are no strings: {keys!r}")
    kind, shape = about.get("value_type"), about.get("write_shape")
    if not isinstance(kind, str):
        raise bad(f"has no value_type: {kind!r}")
    if shape is not None and not _is_shape(shape):
        raise bad(f"has a write_shape that is no list of sizes: {shape!r}")
    leaf = Leaf(tuple(map(str, keys)), kind, None if shape is None else tuple(shape))
    parts_on_disk = leaf.name.split("/")
    if not leaf.name.isprintable() or ".." in parts_on_disk or "" in parts_on_disk:
        raise bad(f"has a name that is no path inside the checkpoint: {leaf.name!r}")
    return leaf


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_unique(leaves: tuple[Leaf, ...], path: Path) -> None:
    seen: dict[str, Leaf] = {}
    for leaf in leaves:
        if leaf.name in seen:
            raise InputError(
                f"{path}: the leaves {seen[leaf.name].keys} and {leaf.keys} are both called "
                f"{leaf.name!r} on the disk",
                "save it again under keys that differ once joined with dots",
            )
        seen[leaf.name] = leaf
