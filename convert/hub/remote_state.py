"""What lies in a repository of the Hub, and how it differs from what should."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemma_convert.convert.errors import RemoteError
from gemma_convert.convert.hub.local_files import PushFile
from gemma_convert.convert.hub.session import hub_errors, patiently
from gemma_convert.convert.readers.orbax_steps import TREE_FILE

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_MADE_WITH = {".gitattributes"}
"""What the Hub puts into a new repository."""

_WEIGHTS = (".safetensors", ".safetensors.index.json")


@dataclass(frozen=True)
class RemoteFile:
    """A file in a repository.

    Attributes:
        size: Bytes.
        blob: The git blob's SHA-1 (of the pointer, where git LFS or Xet holds the content).
        sha256: Of the content, where git LFS or Xet holds it; else empty.
    """

    size: int
    blob: str
    sha256: str = ""

    @property
    def digest(self) -> str:
        """What the Hub knows its content by, for messages."""
        return f"sha256:{self.sha256}" if self.sha256 else f"git blob {self.blob}"

    def is_same(self, file: PushFile) -> bool:
        """Whether its content is that of ``file``."""
        if self.size != file.size:
            return False
        return self.sha256 == file.sha256 if self.sha256 else self.blob == file.blob


@dataclass(frozen=True)
class RemoteState:
    """A repository at one commit.

    Attributes:
        exists: Whether there is such a repository.
        private: Whether only its owners see it.
        commit: The commit that ``files`` are of.
        files: Name to file.
    """

    exists: bool
    private: bool = True
    commit: str | None = None
    files: dict[str, RemoteFile] = field(default_factory=dict)


def remote_state(api: HfApi, repo: str) -> RemoteState:
    """The head of the repository's main branch; a repository that is not there holds nothing.

    Raises:
        RemoteError: The Hub refuses or cannot be reached.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    with hub_errors(repo):
        try:
            info = api.model_info(repo)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return RemoteState(exists=False)
        return RemoteState(True, bool(info.private), info.sha, list_remote(api, repo, info.sha))


def create_repo(api: HfApi, repo: str, *, private: bool) -> str | None:
    """Make a repository.

    One that holds nothing is as good: it may be ours, made by a request whose answer was lost.

    Returns:
        The commit that it begins with.

    Raises:
        RemoteError: The Hub refuses or cannot be reached, or the name is taken.
    """

    def create() -> None:
        with hub_errors(repo):
            api.create_repo(repo, private=private)

    refused: RemoteError | None = None
    try:
        patiently(create)
    except RemoteError as error:
        refused = error
    made = patiently(lambda: remote_state(api, repo))
    empty = made.exists and made.private == private and made.files.keys() <= _MADE_WITH
    if refused is not None and not empty:
        raise refused
    return made.commit


def list_remote(api: HfApi, repo: str, commit: str | None) -> dict[str, RemoteFile]:
    """Every file at one commit."""
    from huggingface_hub.hf_api import RepoFile

    return {
        entry.path: RemoteFile(entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else "")
        for entry in api.list_repo_tree(repo, recursive=True, revision=commit)
        if isinstance(entry, RepoFile)
    }


def leftovers(remote: Iterable[str], local: Iterable[str]) -> list[str]:
    """What an earlier push left there that a loader would mix up with the new files.

    Weights and indexes in the folders that the push writes weights to, and in a folder of an Orbax
    checkpoint whatever the push does not write. Everything else is left alone.
    """
    names = set(local)
    weights = {_folder(name) for name in names if name.endswith(_WEIGHTS)}
    trees = {name.split("/")[0] for name in names if name.endswith("/" + TREE_FILE)}
    return sorted(
        name
        for name in set(remote) - names
        if (name.endswith(_WEIGHTS) and _folder(name) in weights) or name.split("/")[0] in trees
    )


def check_pushed(
    repo: str, found: dict[str, RemoteFile], files: Iterable[PushFile], gone: Iterable[str]
) -> None:
    """Compare what the repository holds now with what was sent.

    Raises:
        RemoteError: A file is missing, differs, or should be gone.
    """
    for file in files:
        remote = found.get(file.name)
        if remote is None:
            raise RemoteError(
                f"{repo}: {file.name} is not there after the upload",
                "if the repository has a .gitignore, see that it does not name it; then push again",
            )
        if not remote.is_same(file):
            raise RemoteError(
                f"{repo}: {file.name} differs after the upload: expected {file.size} bytes "
                f"sha256:{file.sha256}, found {remote.size} bytes {remote.digest}",
                "push again",
            )
    for name in gone:
        if name in found:
            raise RemoteError(f"{repo}: {name} is still there after the upload", "push again")


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
