"""Pushing to a Hub on loopback: what arrives, in which order, what goes, what is asked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.checkpoints import (
    GEMMA3,
    base_arrays,
    factor_arrays,
    run_cli,
    snapshot,
    write_base,
    write_run,
)
from tests.hub_push import REPO, contents
from tests.hub_server import Hub

# huggingface_hub 1.33 hands an open file to httpx in the older of two ways.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")


def test_everything_arrives_and_is_private(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(model)
    assert run_cli("push", model, REPO) == 0
    repo = hub.repos[REPO]
    assert repo.private
    pushed = {n: d for n, d in repo.files.items() if n not in (".gitattributes", "README.md")}
    assert pushed == contents(model)
    assert snapshot(model) == before
    out = capsys.readouterr().out
    assert f"{hub.endpoint}/{REPO} (private): 9 files sent" in out


def test_weights_are_sent_before_anything_names_them_and_one_commit_shows_all(
    hub: Hub, model: Path
) -> None:
    assert run_cli("push", model, REPO, "--quiet") == 0
    paths = [path for method, path in hub.requests if method in ("PUT", "POST")]
    sent = [i for i, path in enumerate(paths) if path.startswith("/lfs/")]
    assert len(sent) == 4  # three shards, then the tokenizer
    commits = [i for i, path in enumerate(paths) if "/commit/" in path]
    assert len(commits) == 1
    assert max(sent) < commits[0]
    tokenizer = paths.index(
        next(p for p in paths if p.startswith("/lfs/") and len(hub.lfs[p[5:]]) == 8)
    )
    assert tokenizer == max(sent)


def test_public_only_if_asked(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("push", model, REPO, "--public", "--quiet") == 0
    assert not hub.repos[REPO].private
    assert run_cli("push", model, REPO, "--quiet") == 1
    assert capsys.readouterr().err == (
        f"error: {REPO} is public: everyone would see what is pushed; say so with --public, or "
        "make it private in its settings\n"
    )


def test_pushing_again_sends_nothing(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("push", model, REPO, "--quiet") == 0
    head = hub.repos[REPO].head
    hub.requests.clear()
    assert run_cli("push", model, REPO, "--json") == 0
    assert hub.repos[REPO].head == head
    assert not hub.sent("PUT", "")
    assert not hub.sent("POST", "")
    done = json.loads(capsys.readouterr().out)
    assert (done["uploaded"], done["deleted"], done["commit"]) == ([], [], head)
    assert len(done["unchanged"]) == 9


def test_shards_of_an_earlier_push_are_deleted_in_the_same_commit(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("push", model, REPO, "--quiet") == 0
    extra = {"notes/eval.txt": b"mine", "other/model.safetensors": b"another", "x.gguf": b"GGUF"}
    repo = hub.repos[REPO]
    repo.commit(repo.files | extra)
    single = write_base(tmp_path / "single", GEMMA3, base_arrays(GEMMA3, "model.", seed=4))
    assert run_cli("push", single, REPO) == 1
    err = capsys.readouterr().err
    assert "would delete model-00001-of-00003.safetensors, delete model-00002-of" in err
    assert err.endswith("say yes with --yes, or choose another name\n")
    assert len(repo.commits) == 4 - 1
    assert run_cli("push", single, REPO, "--yes", "--json") == 0
    assert len(repo.commits) == 4
    names = set(repo.files)
    assert {name for name in names if name.startswith("model")} == {"model.safetensors"}
    assert extra.items() <= repo.files.items()
    assert {"tokenizer.json", "chat_template.jinja"} <= names  # not weights: left alone
    deleted = json.loads(capsys.readouterr().out)["deleted"]
    assert deleted == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]


def test_a_terminal_is_asked(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("push", model, REPO, "--quiet") == 0
    (model / "chat_template.jinja").write_text("changed")
    head = hub.repos[REPO].head
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda text: "n")
    assert run_cli("push", model, REPO) == 130
    assert hub.repos[REPO].head == head
    assert "would replace chat_template.jinja" in capsys.readouterr().err
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda text: "y")
    assert run_cli("push", model, REPO) == 0
    assert hub.repos[REPO].files["chat_template.jinja"] == b"changed"


def test_dry_run_sends_nothing(hub: Hub, merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(REPO, {"model-00001-of-00009.safetensors": b"old", "chat_template.jinja": b"{{ x }}"})
    assert run_cli("push", merged, REPO, "--dry-run", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["deleted"] == ["model-00001-of-00009.safetensors"]
    assert shown["exists"]
    assert not shown["files"]["chat_template.jinja"]["sent"]
    assert shown["files"]["config.json"]["sent"]
    assert set(shown["files"]) == {*contents(merged), "README.md"}
    assert run_cli("push", merged, REPO, "--dry-run") == 0
    text = capsys.readouterr().out
    assert "delete" in text
    assert "# tuned" in text
    assert not hub.sent("PUT", "")
    assert not hub.sent("POST", "")
    assert len(hub.repos[REPO].commits) == 1


def test_dry_run_without_a_token(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert run_cli("push", model, REPO, "--dry-run") == 0
    captured = capsys.readouterr()
    assert "note: the Hub was not looked at: there is no token for the Hub" in captured.err
    assert "model-00001-of-00003.safetensors" in captured.out
    assert hub.requests == []


def test_no_regular_file(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(model / "pipe")
    assert run_cli("push", model, REPO) == 1
    assert f"{model / 'pipe'} is no regular file" in capsys.readouterr().err


def test_a_shard_that_is_not_the_ledgers(
    hub: Hub, merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = sorted(merged.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert run_cli("push", merged, REPO) == 1
    err = capsys.readouterr().err
    assert f"{shard} is not what conversion.json describes: expected sha256:" in err
    assert hub.repos == {}


@pytest.mark.parametrize(
    "name", ["tuned", "a/b/c", "org/", "org/..", "org/a--b", "/x/y", "org/na me"]
)
def test_names(hub: Hub, model: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("push", model, name) == 1
    assert capsys.readouterr().err == (
        f"error: {name!r} is not the name of a Hub repository; give it as ORG/NAME\n"
    )
    assert hub.requests == []


def test_the_option_of_the_main_job(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    out = tmp_path / "out"
    words = ["orbax-to-hf", run, "--base", base, "--out", out, "--alpha", "5"]
    assert run_cli(*words, "--public") == 2
    assert "--public and --yes are about --push-to-hub" in capsys.readouterr().err
    assert run_cli(*words, "--push-to-hub", "others/tuned") == 1
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("error: others/tuned: the token has no right to do this (HTTP 403")
    )
    assert out.is_dir()
    words[5] = out.with_name("two")
    assert run_cli(*words, "--push-to-hub", REPO, "--json") == 0
    json.loads(capsys.readouterr().out)
    assert (
        hub.repos[REPO].files["model.safetensors"] == (words[5] / "model.safetensors").read_bytes()
    )


def test_the_option_finds_a_wrong_name_before_the_work(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    words = ["convert", base, "--to", "tunix", "--out", tmp_path / "out"]
    assert run_cli(*words, "--push-to-hub", "nowhere") == 1
    monkeypatch.delenv("HF_TOKEN")
    assert run_cli(*words, "--push-to-hub", REPO) == 1
    assert "there is no token for the Hub; run `hf auth login`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
