"""What a Hub repository is called: ``org/name``, ``hf://org/name@revision/path/inside``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemma_convert.convert.errors import InputError

SCHEME = "hf://"

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}")
_PLAIN = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^@\s]+))?")


@dataclass(frozen=True)
class HubPath:
    """A repository of models, at a revision, or a folder inside it.

    Attributes:
        repo: ``org/name``.
        revision: Branch, tag or commit; the default branch if None.
        folder: Path inside the repository; empty for its top.
    """

    repo: str
    revision: str | None = None
    folder: str = ""

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return SCHEME + self.repo + at + (f"/{self.folder}" if self.folder else "")


def is_repo_id(text: str) -> bool:
    """Whether ``text`` can be the name of a repository: two parts, no ``..`` or ``--``."""
    return _REPO.fullmatch(text) is not None and ".." not in text and "--" not in text


def parse_repo_id(text: str) -> str:
    """The repository that a user names to push to; ``hf://`` may stand before it.

    Raises:
        InputError: Not ``org/name``.
    """
    name = text.removeprefix(SCHEME)
    if not is_repo_id(name):
        raise InputError(f"{text!r} is not the name of a Hub repository", "give it as ORG/NAME")
    return name


def parse_hub_path(text: str) -> HubPath:
    """Parse ``hf://org/name[@revision][/folder]``.

    A revision that holds a slash (``refs/pr/1``) is written with ``%2F``, as in a URL.

    Raises:
        InputError: Anything else.
    """
    from urllib.parse import unquote

    parts = text.removeprefix(SCHEME).split("/", 2)
    head, folder = "/".join(parts[:2]), "/".join(parts[2:]).strip("/")
    found = _PLAIN.fullmatch(head)
    if found is None or not is_repo_id(found["repo"]) or ".." in folder.split("/"):
        raise InputError(
            f"{text!r} is not a path on the Hub", "write it as hf://ORG/NAME or hf://ORG/NAME@REV"
        )
    revision = unquote(found["revision"]) if found["revision"] else None
    return HubPath(found["repo"], revision, folder)


def plain_hub_path(text: str) -> HubPath | None:
    """What ``org/name`` or ``org/name@revision`` names, if ``text`` is of that form."""
    found = _PLAIN.fullmatch(text)
    if found is None or not is_repo_id(found["repo"]):
        return None
    return HubPath(found["repo"], found["revision"])
