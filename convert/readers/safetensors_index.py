"""Which files of a directory are the model's shards, with and without an index.

``model.safetensors.index.json`` maps each tensor to its shard and is an allowlist: a file that it
does not name is not part of the model, though it may well lie there from an earlier save.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.safetensors_header import Header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_INDEX_SUFFIX = ".safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")
_FETCH = "download the missing file, or save the model again"
_CLEAN = "keep the files of one save only, with the index that was written with them"


@dataclass(frozen=True)
class Index:
    """A checked index.

    Attributes:
        path: The index file.
        weight_map: Tensor to the name of its shard, relative to the directory.
        shards: The shards' names, sorted.
    """

    path: Path
    weight_map: Mapping[str, str]
    shards: tuple[str, ...]


def find_index(directory: Path) -> Path | None:
    """The directory's index file, if it has one.

    Raises:
        InputError: Several, none of them called `INDEX_NAME`.
    """
    found = sorted(path for path in directory.iterdir() if path.name.endswith(_INDEX_SUFFIX))
    names = [path.name for path in found]
    if INDEX_NAME in names:
        return directory / INDEX_NAME
    if len(found) > 1:
        raise InputError(f"{directory} holds several indexes: {', '.join(names)}", _CLEAN)
    return found[0] if found else None


def read_index(path: Path) -> Index:
    """Read an index and check every entry.

    Raises:
        InputError: Not JSON, no weight_map, an entry that leaves the directory, a missing shard.
    """
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path} has no weight_map", "download it again, or save the model again")
    for name, shard in weight_map.items():
        _check_shard(name, shard, path)
    shards = tuple(sorted(set(weight_map.values())))
    for shard in shards:
        # Not Path.is_file, which raises where a name is longer than the file system allows.
        if not os.path.isfile(path.parent / shard):
            raise InputError(f"{path} names the shard {shard}, which is not there", _FETCH)
    return Index(path, weight_map, shards)


def _check_shard(name: str, shard: Any, path: Path) -> None:
    parts = PurePosixPath(shard).parts if isinstance(shard, str) else ()
    safe = parts and ".." not in parts and parts[0] != "/" and not re.search(r"[\\\0]|^\w:", shard)
    if not safe:
        raise InputError(
            f"{path} puts tensor {name!r} in {shard!r}, which leaves the directory",
            "do not use this index: download it again from a source you trust",
        )
    if not shard.isprintable():
        raise InputError(
            f"{path} puts tensor {name!r} in {shard!r}, which holds control characters",
            "do not use this index: download it again from a source you trust",
        )
    if not shard.endswith(".safetensors"):
        raise InputError(
            f"{path} puts tensor {name!r} in {shard!r}, which is no safetensors file",
            "nothing is unpickled here: save the model again as safetensors",
        )


def check_index(index: Index, headers: Mapping[str, Header]) -> None:
    """Compare an index with the headers of its shards: they must tell the same story.

    Raises:
        InputError: A tensor in two shards, in another shard than the index says, in none, or in a
            shard but not in the index.
    """
    holders = locate(headers)
    for name, shard in index.weight_map.items():
        if name not in headers[shard].entries:
            other = f", but {holders[name]} holds it" if name in holders else ""
            raise InputError(
                f"{index.path} puts tensor {name!r} in {shard}, which does not hold it{other}",
                _CLEAN,
            )
    for name, shard in holders.items():
        if name not in index.weight_map:
            raise InputError(f"{shard} holds tensor {name!r}, which {index.path} lacks", _CLEAN)


def locate(headers: Mapping[str, Header]) -> dict[str, str]:
    """Tensor to the one file that holds it.

    Raises:
        InputError: Two files hold a tensor of the same name.
    """
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.entries:
            if name in holders:
                raise InputError(f"{holders[name]} and {file} both hold tensor {name!r}", _CLEAN)
            holders[name] = file
    return holders


def check_numbering(directory: Path, names: tuple[str, ...]) -> None:
    """Without an index, the shards' own numbers must be complete: ``-00001-of-00003`` and so on.

    Raises:
        InputError: A number is missing, or the shards of two saves lie together.
    """
    found: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            key = (match["stem"], int(match["count"]))
            found.setdefault(key, set()).add(int(match["number"]))
    counts = sorted({count for _, count in found})
    if len(counts) > 1:
        raise InputError(
            f"{directory} holds shards of several saves: of {counts[0]} and of {counts[1]}", _CLEAN
        )
    for (stem, count), numbers in found.items():
        missing = next((n for n in range(1, count + 1) if n not in numbers), None)
        if missing is not None:
            raise InputError(
                f"{directory} lacks {stem}-{missing:05d}-of-{count:05d}.safetensors", _FETCH
            )
