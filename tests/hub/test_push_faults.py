"""A Hub that fails: what passes is tried again, the rest is one line, and the token is in none."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

import pytest

from tests.checkpoints import GEMMA3, base_arrays, run_cli, write_base
from tests.hub_server import TOKEN, Fault, Hub

# huggingface_hub 1.33 hands an open file to httpx in the older of two ways.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")

REPO = "org/tuned"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = base_arrays(GEMMA3, "model.")
    return write_base(tmp_path / "model", GEMMA3, weights, shards=3, files={"a.txt": "text"})


def pushed(hub: Hub, model: Path) -> bool:
    files = hub.repos[REPO].files
    return all(files.get(path.name) == path.read_bytes() for path in model.iterdir())


@pytest.mark.parametrize("status", [0, -1, 429, 503])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/whoami"),
        ("GET", "/api/models/org/tuned$"),
        ("POST", "/repos/create"),
        ("POST", "/preupload/"),
        ("POST", "/objects/batch"),
        ("PUT", "/lfs/"),
        ("POST", "/commit/"),
        ("GET", "/tree/"),
    ],
)
def test_what_passes_is_tried_again(
    hub: Hub, model: Path, method: str, path: str, status: int
) -> None:
    times = 1 if status == -1 else 2  # what was carried out once is not asked for again
    hub.faults.append(Fault(method, path, status, times))
    assert run_cli("push", model, REPO, "--quiet") == 0
    assert hub.faults[0].times == 0
    assert pushed(hub, model)
    made = hub.repos[REPO].commits
    assert len(made) == 2  # a commit whose answer was lost is not made twice


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("GET", "/whoami", 401), "the Hub: the Hub does not accept the token (HTTP 401"),
        (Fault("POST", "/repos/create", 403), f"{REPO}: the token has no right to do this (HTTP 4"),
        (Fault("POST", "/repos/create", 409), f"{REPO}: the name is taken, or another upload"),
        (Fault("POST", "/commit/", 403), f"{REPO}: the token has no right to do this (HTTP 403"),
        (Fault("POST", "/commit/", 412), f"{REPO}: it was changed by someone else meanwhile"),
        (Fault("PUT", "/lfs/", 403), f"{REPO}: the token has no right to do this (HTTP 403"),
        (Fault("PUT", "/lfs/", 500, 99), f"{REPO}: the Hub has a fault of its own (HTTP 500"),
        (Fault("PUT", "/lfs/", 0, 99), f"{REPO}: the Hub cannot be reached ("),
        (Fault("POST", "/batch", 429, 99), f"{REPO}: the Hub's rate limit is reached (HTTP 429"),
    ],
)
def test_what_does_not_pass_is_one_line(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], fault: Fault, message: str
) -> None:
    hub.faults.append(fault)
    assert run_cli("push", model, REPO, "--quiet") == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith(f"error: {message}")
    assert captured.out == ""
    assert REPO not in hub.repos or len(hub.repos[REPO].commits) == 1
    fault.times = 0
    assert run_cli("push", model, REPO, "--quiet") == 0
    assert pushed(hub, model)


@pytest.mark.parametrize("theirs", ["files", "public"])
def test_someone_else_takes_the_name_meanwhile(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], theirs: str
) -> None:
    """A repository that holds something, or that everyone sees, is not taken for ours."""
    files = {".gitattributes": b"", **({"config.json": b"{}"} if theirs == "files" else {})}

    def take(method: str, path: str) -> None:
        if path.endswith("/repos/create"):
            hub.add(REPO, files, private=theirs == "files")

    hub.on_request = take
    assert run_cli("push", model, REPO, "--quiet") == 1
    assert f"error: {REPO}: the name is taken" in capsys.readouterr().err
    assert hub.repos[REPO].files == files


def test_content_that_arrived_is_not_sent_again(hub: Hub, model: Path) -> None:
    """One of the files is refused once the others are there."""
    shards = sorted(model.glob("*.safetensors"))
    refused = "/lfs/" + hashlib.sha256(shards[0].read_bytes()).hexdigest()

    def after_the_others(method: str, path: str) -> None:
        deadline = time.monotonic() + 30
        while (method, path) == ("PUT", refused) and len(hub.lfs) < len(shards) - 1:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    hub.faults.append(Fault("PUT", refused, 500, times=99))
    hub.on_request = after_the_others
    assert run_cli("push", model, REPO, "--quiet") == 1
    assert len(hub.lfs) == len(shards) - 1 == 2
    hub.faults.clear()
    hub.requests.clear()
    assert run_cli("push", model, REPO, "--quiet") == 0
    assert hub.sent("PUT", "/lfs/") == [refused]
    assert pushed(hub, model)


@pytest.mark.parametrize("moment", ["PUT /lfs/", "POST /api/models/org/tuned/preupload"])
def test_a_file_that_changes_meanwhile(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    changed: list[str] = []

    def change(method: str, path: str) -> None:
        if f"{method} {path}".startswith(moment) and not changed:
            changed.append(path)
            data = bytearray((model / SHARD).read_bytes())
            data[-1] ^= 1
            (model / SHARD).write_bytes(data)

    hub.on_request = change
    assert run_cli("push", model, REPO, "--quiet") == 1
    assert changed
    assert f"{model / SHARD} was changed while it was being" in capsys.readouterr().err
    assert len(hub.repos[REPO].commits) == 1


def test_someone_else_commits_meanwhile(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def commit(method: str, path: str) -> None:
        if "/commit/" in path:
            hub.repos[REPO].commit({**hub.repos[REPO].files, "theirs": b"x"})

    hub.on_request = commit
    assert run_cli("push", model, REPO, "--quiet") == 1
    assert "it was changed by someone else meanwhile" in capsys.readouterr().err
    assert set(hub.repos[REPO].files) == {".gitattributes", "theirs"}


def test_what_arrived_is_compared(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once a shard that differs, once a small file, once one that is not there at all."""
    shard, small = (model / SHARD).read_bytes(), (model / "a.txt").read_bytes()
    cases = [
        ({SHARD: b"x" * len(shard)}, f"{SHARD} differs after the upload: expected {len(shard)} by"),
        ({"a.txt": b"y" * len(small)}, "a.txt differs after the upload: expected 4 bytes"),
        ({"a.txt": None}, "a.txt is not there after the upload"),
    ]
    for number, (wrong, message) in enumerate(cases):
        name = f"{REPO}{number}"

        def tamper(method: str, path: str) -> None:
            repo = hub.repos.get(name)  # noqa: B023 - called within this turn of the loop
            if "/tree/" in path and repo is not None and len(repo.commits) == 2:
                files = repo.files | wrong  # noqa: B023
                repo.commits[1] = (repo.head, {n: d for n, d in files.items() if d is not None})

        hub.on_request = tamper
        assert run_cli("push", model, name, "--quiet") == 1
        assert f"{name}: {message}" in capsys.readouterr().err


def test_a_file_that_the_repository_ignores(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, {".gitignore": b"a.txt"})
    assert run_cli("push", model, REPO, "--quiet") == 1
    assert "a.txt is not there after the upload; if the repository has a .gitignore" in (
        capsys.readouterr().err
    )


def test_no_token(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert run_cli("push", model, REPO) == 1
    assert capsys.readouterr().err == (
        "error: there is no token for the Hub; run `hf auth login`, or set HF_TOKEN, with a token "
        "that may write\n"
    )
    assert hub.requests == []


def test_offline(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    assert run_cli("push", model, REPO, "--quiet") == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the Hub: the Hub cannot be reached (")
    assert err.endswith("what has arrived is not sent again\n")
    assert len(err.splitlines()) == 1


def test_the_offline_mode_of_the_hubs_client(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()  # the mode is read when a session is made
    try:
        assert run_cli("push", model, REPO, "--quiet") == 1
    finally:
        close_session()
    assert capsys.readouterr().err == (
        "error: the Hub: HF_HUB_OFFLINE forbids the network; unset it\n"
    )
    assert hub.requests == []


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("status", [0, 401, 403, 500])
def test_the_token_is_never_shown(
    hub: Hub,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    accepted: bool,
    status: int,
) -> None:
    """Nor stored, by a server that even repeats it in its message, with all that can be told."""
    token = TOKEN if accepted else "hf_" + "another0secret"
    monkeypatch.setenv("HF_TOKEN", token)
    said = {"X-Error-Message": f"Bearer {token} may not do this"}
    hub.faults.append(Fault("POST", "/commit/", status, times=9, headers=said))
    with caplog.at_level(logging.INFO):
        run_cli("push", model, REPO, "--debug")
    captured = capsys.readouterr()
    assert "error: " in captured.err
    assert token not in captured.err + captured.out + caplog.text
    if accepted and status in (401, 403, 500):
        assert "<token> may not do this" in captured.err
    for path in model.parent.rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes()
    for repo in hub.repos.values():
        assert not any(token.encode() in data for data in repo.files.values())
