"""Links in a directory that is not trusted: what they may point to.

Weights are only parsed, so a safetensors file may be a link to anywhere. What is copied as it is
(tokenizer, chat templates, ...), and what lies inside an Orbax tree, must not bring in files from
elsewhere, such as keys from the home directory that would be pushed with the model. The Hub's cache
is made of links, ``snapshots/REVISION/file -> ../../blobs/HASH``, and those are followed.
"""

from __future__ import annotations

import os
from pathlib import Path

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers.regular_file import refuse_special

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def refuse_leaving(path: Path, root: Path) -> None:
    """Raise InputError if ``path`` is, once links are followed, neither in ``root`` nor a Hub blob.

    Args:
        path: A path below ``root``.
        root: A directory, which may be given by a link itself.
    """
    target = Path(os.path.realpath(path))
    home = Path(os.path.realpath(root))
    if not any(target.is_relative_to(place) for place in (home, *_blobs(home))):
        raise InputError(
            f"{path} is a link out of the directory, to {target}",
            "copy what it points to into the directory, if you trust it, or remove the link",
        )


def check_files(root: Path) -> None:
    """Refuse links that leave ``root``, and pipes and devices, anywhere below it.

    For a tree whose files another library opens.

    Raises:
        InputError: It names the first one found.
    """
    for folder, folders, files in os.walk(root):
        for name in files + folders:
            path = Path(folder, name)
            if path.is_symlink():
                refuse_leaving(path, root)
            refuse_special(path)


def _blobs(home: Path) -> list[Path]:
    """The Hub cache's folder of blobs, if ``home`` lies in a snapshot there.

    No link is followed on the way to it: a folder called so may itself be one that leads out.
    """
    folders = (home, *home.parents)
    snapshot = next((f for f in folders if f.parent.name == _SNAPSHOTS), None)
    return [] if snapshot is None else [snapshot.parent.parent / _BLOBS]
