"""Push a directory to the Hub: weights first, then one commit that makes all of it visible.

The content of large files is uploaded before anything refers to it (git LFS or Xet; content that
the Hub has already is not sent again, so an interrupted push goes on where it stopped). Then one
commit adds every file and deletes what an earlier push left over: who downloads the repository
gets the old model or the new one, never a mixture. Last, the repository is listed and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gemma_convert import __version__
from gemma_convert.convert.errors import InputError, RemoteError
from gemma_convert.convert.hub.front_matter import read_front_matter
from gemma_convert.convert.hub.local_files import PushFile, in_memory
from gemma_convert.convert.hub.model_card import (
    CARD_NAME,
    card_metadata,
    render_card,
    stated_license,
)
from gemma_convert.convert.hub.remote_state import (
    RemoteState,
    check_pushed,
    create_repo,
    leftovers,
    list_remote,
    remote_state,
)
from gemma_convert.convert.hub.session import PassingError, hub_errors, patiently
from gemma_convert.convert.hub.side_by_side import side_by_side
from gemma_convert.convert.hub.source import Source, decoded

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Say = Callable[[str], None]


@dataclass(frozen=True)
class Push:
    """What a push will do.

    Attributes:
        repo: ``org/name``.
        public: Whether a repository that is made is visible to everyone.
        files: Everything that will be there, in the order of the upload.
        remote: What is there.
        delete: What will be deleted there.
        notes: What a user should know.
    """

    repo: str
    public: bool
    files: tuple[PushFile, ...]
    remote: RemoteState
    delete: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def to_send(self) -> tuple[PushFile, ...]:
        """The files that are not there yet as they should be."""
        there = self.remote.files
        return tuple(f for f in self.files if f.name not in there or not there[f.name].is_same(f))

    @property
    def replaced(self) -> tuple[str, ...]:
        """Files there whose content will change, but for the generated ones."""
        return tuple(
            f.name for f in self.to_send if f.name in self.remote.files and f.name != CARD_NAME
        )


def check_target(api: HfApi, repo: str, *, public: bool) -> RemoteState:
    """What is at the target, once it is sure that the push may go there.

    Raises:
        RemoteError: No access, a token that is not accepted, or a public repository where a
            private one was asked for.
    """

    def who() -> Any:
        with hub_errors("the Hub"):
            return api.whoami()

    patiently(who)
    remote = patiently(lambda: remote_state(api, repo))
    if remote.exists and not remote.private and not public:
        raise RemoteError(
            f"{repo} is public: everyone would see what is pushed",
            "say so with --public, or make it private in its settings",
        )
    return remote


def plan_push(
    api: HfApi | None,
    source: Source,
    repo: str,
    remote: RemoteState,
    *,
    public: bool,
    progress: Callable[[int], None],
) -> Push:
    """Decide what goes where; nothing is written.

    Args:
        api: The Hub, to look up the base's licence and a README that is there; None stays offline.
        source: What to push.
        repo: Where.
        remote: What is there.
        public: See `Push`.
        progress: Called with bytes as they are hashed.

    Raises:
        InputError: A file that cannot be read or must not be sent.
    """
    files = source.hashed(progress)
    notes = list(source.notes)
    card = source.card
    if not card.license and card.base_model and api is not None:
        card = replace(card, license=_base_license(api, card.base_model, notes))
    existing = source.readme
    if existing is None and api is not None and CARD_NAME in remote.files:
        existing = _remote_readme(api, repo, remote)
    text = render_card(card, existing)
    files.append(in_memory(CARD_NAME, text.encode()))
    notes += _card_notes(text, card_metadata(card))
    if remote.exists and remote.private and public:
        notes.append(f"{repo} stays private: that is changed in its settings")
    delete = leftovers(remote.files, [file.name for file in files])
    return Push(repo, public, tuple(files), remote, tuple(delete), tuple(notes))


def push(api: HfApi, plan: Push, say: Say) -> dict[str, Any]:
    """Carry out a push and check it.

    Args:
        api: The Hub.
        plan: What to do.
        say: Told what is being done, a line at a time.

    Returns:
        What was done: repo, url, commit, private, uploaded, unchanged, deleted, bytes.

    Raises:
        RemoteError: The Hub refuses, cannot be reached, or holds something else in the end.
        InputError: A file changed meanwhile.
    """
    head = plan.remote.commit
    if not plan.remote.exists:
        say(f"creating {plan.repo} ({'public' if plan.public else 'private'})")
        head = create_repo(api, plan.repo, private=not plan.public)
    commit = head
    if plan.to_send or plan.delete:
        try:
            additions = _upload(api, plan, say)
        except KeyboardInterrupt as error:
            error.add_note("nothing was committed; push again: what has arrived is not sent twice")
            raise
        commit = _commit(api, plan, additions, head, say)

    def listed() -> Any:
        with hub_errors(plan.repo):
            return list_remote(api, plan.repo, commit)

    check_pushed(plan.repo, patiently(listed), plan.files, plan.delete)
    return {
        "repo": plan.repo,
        "url": f"{api.endpoint}/{plan.repo}",
        "commit": commit,
        "private": plan.remote.private if plan.remote.exists else not plan.public,
        "uploaded": [file.name for file in plan.to_send],
        "unchanged": [file.name for file in plan.files if file not in plan.to_send],
        "deleted": list(plan.delete),
        "bytes": sum(file.size for file in plan.to_send),
    }


def _upload(api: HfApi, plan: Push, say: Say) -> list[Any]:
    """Send the content of large files, weights first; nothing refers to it yet."""
    additions = [(file, _addition(file)) for file in plan.to_send]
    weights = [a for a in additions if a[0].name.endswith(".safetensors")]
    for group in (weights, [a for a in additions if a not in weights]):
        if not group:
            continue
        size = sum(file.size for file, _ in group)
        names = _some([file.name for file, _ in group])
        say(f"uploading {len(group)} files, {size / 1e9:.3f} GB: {names}")
        _send(api, plan, group)
    for file in plan.files:
        file.check_unchanged()
    return [addition for _, addition in additions]


def _send(api: HfApi, plan: Push, group: Sequence[tuple[PushFile, Any]]) -> None:
    def send() -> None:
        with hub_errors(plan.repo):
            api.preupload_lfs_files(
                plan.repo, additions=[addition for _, addition in group], free_memory=False
            )

    try:
        side_by_side([partial(patiently, send)])
    except (RemoteError, RuntimeError):  # of the client, where a file ended too early
        for file, _ in group:
            file.check_unchanged()  # says more than the Hub, which found another digest
        raise
    for file, addition in group:
        if addition.upload_info.sha256.hex() != file.sha256:
            raise InputError(
                f"{file.path} was changed while it was being sent; nothing was committed",
                "let no other program touch the directory, then run again",
            )


def _addition(file: PushFile) -> Any:
    from huggingface_hub import CommitOperationAdd

    file.check_unchanged()
    content = file.data if file.path is None else str(file.path)
    addition = CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=content or b"")
    addition.upload_info.sha256 = bytes.fromhex(file.sha256)
    return addition


def _commit(
    api: HfApi, plan: Push, additions: Sequence[Any], head: str | None, say: Say
) -> str | None:
    """Make everything visible at once, on top of the commit that was looked at."""
    from huggingface_hub import CommitOperationDelete

    deletions = [CommitOperationDelete(name) for name in plan.delete]
    say(f"committing {len(additions)} files" + (f", deleting {len(deletions)}" * bool(deletions)))

    def commit() -> str | None:
        try:
            with hub_errors(plan.repo):
                made = api.create_commit(
                    plan.repo,
                    operations=[*additions, *deletions],
                    commit_message=f"Upload with gemma-convert {__version__}",
                    parent_commit=head,
                )
                return str(made.oid)
        except PassingError:
            # The answer may have been lost, not the commit.
            done = remote_state(api, plan.repo)
            if done.commit == head:
                raise
            check_pushed(plan.repo, done.files, plan.files, plan.delete)
            return done.commit

    return patiently(commit)


def _base_license(api: HfApi, base: str, notes: list[str]) -> dict[str, Any]:
    """What the base's own card says of its licence."""
    try:
        with hub_errors(base):
            data = api.model_info(base).card_data
    except RemoteError as error:
        notes.append(f"the licence of {base} could not be looked up: {error}")
        return {}
    return stated_license(data.to_dict() if data is not None else {})


def _remote_readme(api: HfApi, repo: str, remote: RemoteState) -> str:
    """The card that lies in the repository, which may be the user's own work."""
    from pathlib import Path

    with hub_errors(repo):
        path = api.hf_hub_download(repo, CARD_NAME, revision=remote.commit)
    return decoded(Path(path).read_bytes(), f"{repo}: {CARD_NAME}")


def _card_notes(text: str, metadata: dict[str, Any]) -> list[str]:
    """Where the card says something else than this push, or leaves a thing out."""
    stated = read_front_matter(text, CARD_NAME)
    notes = [
        f"{CARD_NAME} keeps {key}: {stated[key]!r} (this push would say {value!r})"
        for key, value in metadata.items()
        if key != "tags" and stated[key] != value
    ]
    if "base_model" not in stated:
        notes.append("the card names no base model: give its Hub id with --base-model")
    if "license" not in stated:
        notes.append("the card names no licence, as the base's is not known: see --license")
    return notes


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
