"""Which files of a model directory travel along: the tokenizer, chat templates, processors, ..."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.jsonfile import LFS_POINTER, refuse_lfs_pointer
from gemma_convert.convert.readers.links import refuse_leaving
from gemma_convert.convert.readers.regular_file import open_regular

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
)
"""Endings of files that hold weights or optimizer state."""

REWRITTEN = frozenset({"config.json", "adapter_config.json", "conversion.json", "validation.json"})
"""Files that the writers and checks make anew from what was read."""

BASE_CARD = frozenset({"README.md", ".gitattributes"})
"""What belongs to the base's own repository page, not to a model made from it."""

_TOKENIZER = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|chat_template.*|"
    r"additional_chat_templates/.*"
)
"""Files that say together how text becomes ids."""

_VOCABULARY = frozenset({"tokenizer.json", "tokenizer.model"})
"""Of which each makes a tokenizer whole."""

FOLDERS = ("additional_chat_templates",)
"""Folders whose files travel along too (transformers keeps named chat templates there)."""


def side_files(directory: Path) -> dict[str, Path]:
    """The files to carry along, each under its path relative to ``directory``.

    Links to files are followed where `links` allows it; hidden files are left out, as are pipes and
    devices.

    Raises:
        InputError: One of them is a Git LFS pointer, a link out of the directory, or has control
            characters in its name.
    """
    found = [path for path in directory.iterdir() if travels(path.name)]
    for folder in FOLDERS:
        if (directory / folder).is_dir():
            found += (path for path in (directory / folder).iterdir() if path.name[0] != ".")
    files = {str(path.relative_to(directory)): path for path in found if path.is_file()}
    for name, path in files.items():
        if not name.isprintable():
            raise InputError(
                f"{directory} holds a file called {name!r}, with control characters", "rename it"
            )
        refuse_leaving(path, directory)
        with open_regular(path) as file:
            refuse_lfs_pointer(file.read(len(LFS_POINTER)), str(path))
    return dict(sorted(files.items()))


def travels(name: str) -> bool:
    """Whether a file at the top of a model directory is carried along."""
    if name in REWRITTEN or name in BASE_CARD or name.startswith("."):
        return False
    return not name.removesuffix(".index.json").endswith(WEIGHT_SUFFIXES)


def files_of_both(own: Mapping[str, Path], base: Mapping[str, Path]) -> dict[str, Path]:
    """The side files of a checkpoint and its base: of one name the checkpoint's.

    A tokenizer goes as a whole: the checkpoint's, if it has one, gets no template and no added
    tokens of the base.
    """
    whole = not _VOCABULARY.isdisjoint(own)
    others = {n: path for n, path in base.items() if not (whole and _TOKENIZER.fullmatch(n))}
    return {**others, **own}
