"""Pushing to a Hub on loopback: what arrives, in which order, what goes, what is asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkpoints import (
    GEMMA3,
    base_arrays,
    factor_arrays,
    run_cli,
    snapshot,
    tunix_arrays,
    write_base,
    write_run,
)
from tests.hub_server import Hub

# huggingface_hub 1.33 hands an open file to httpx in the older of two ways.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")

REPO = "org/tuned"
SIDE = {
    "tokenizer.json": '{"a": 1}',
    "chat_template.jinja": "{{ x }}",
    "generation_config.json": "{}",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sharded model directory."""
    weights = base_arrays(GEMMA3, "model.")
    return write_base(tmp_path / "model", GEMMA3, weights, shards=3, files=SIDE)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A merged directory as this program writes it, with its ledger."""
    readme = "---\nlicense: gemma\nlicense_link: https://ai.google.dev/gemma/terms\n---\nBase"
    base = write_base(
        tmp_path / "secret place" / "base",
        {**GEMMA3, "_name_or_path": "/home/someone/models/base"},
        base_arrays(GEMMA3, "model."),
        files={**SIDE, "README.md": readme},
    )
    run = write_run(tmp_path / "secret place" / "run", factor_arrays(GEMMA3))
    out = tmp_path / "merged"
    words = ["orbax-to-hf", run, "--base", base, "--out", out, "--alpha", "5", "--quiet"]
    assert run_cli(*words, "--max-shard-size", "3kB") == 0
    return out


def metadata(readme: bytes) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load(readme.decode().split("---\n")[1])
    return value


def contents(directory: Path) -> dict[str, bytes]:
    return {name: data for name, data in snapshot(directory).items() if data is not None}


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


def test_no_local_path_is_published(hub: Hub, merged: Path, tmp_path: Path) -> None:
    assert run_cli("push", merged, REPO, "--quiet") == 0
    files = hub.repos[REPO].files
    for name, data in files.items():
        for leak in (str(tmp_path), "secret place", "/home/someone", str(Path.home())):
            assert leak.encode() not in data, (name, leak)
    ledger = json.loads(files["conversion.json"])
    local = json.loads((merged / "conversion.json").read_text())
    assert [entry["path"] for entry in ledger["inputs"]] == ["model_params", "base"]
    assert ledger["output"]["path"] == "merged"
    assert [a["source"] for a in ledger["adapters"]] == ["model_params"]
    assert ledger["command"] == (
        "gemma-convert orbax-to-hf run --base base --out merged --alpha 5 --quiet "
        "--max-shard-size 3kB"
    )
    changed = {"inputs", "output", "adapters", "merged", "command"}
    assert {k: v for k, v in ledger.items() if k not in changed} == {
        k: v for k, v in local.items() if k not in changed
    }
    assert ledger["output"]["files"] == local["output"]["files"]
    assert json.loads(files["config.json"])["_name_or_path"] == "base"
    assert json.loads((merged / "config.json").read_text())["_name_or_path"].startswith("/home")


def test_the_card_carries_licence_adapter_and_ledger(hub: Hub, merged: Path) -> None:
    base_model = "google/gemma-3-270m"
    assert run_cli("push", merged, REPO, "--quiet", "--base-model", base_model) == 0
    card = hub.repos[REPO].files["README.md"]
    assert metadata(card) == {
        "license": "gemma",
        "license_link": "https://ai.google.dev/gemma/terms",
        "base_model": base_model,
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gemma-convert", "gemma3", "lora"],
    }
    text = card.decode()
    for line in (
        "| rank | 2 |",
        "| alpha | 5 |",
        "| modules | down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj |",
        "| tensors | 14 copied, 14 merged |",
        f'AutoModelForCausalLM.from_pretrained("{REPO}", dtype="auto")',
        f"vllm serve {REPO}",
    ):
        assert line in text
    config = json.loads(hub.repos[REPO].files["config.json"])
    assert config["_name_or_path"] == base_model


def test_the_licence_of_a_base_on_the_hub_is_looked_up(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("google/gemma-4-31b", {"config.json": b"{}"}, private=False)
    hub.cards["google/gemma-4-31b"] = {"license": "apache-2.0", "tags": ["gemma"]}
    assert run_cli("push", model, REPO, "--base-model", "google/gemma-4-31b") == 0
    assert metadata(hub.repos[REPO].files["README.md"])["license"] == "apache-2.0"
    assert "licence" not in capsys.readouterr().err
    assert run_cli("push", model, "org/other", "--base-model", "google/none") == 0
    assert "license" not in metadata(hub.repos["org/other"].files["README.md"])
    err = capsys.readouterr().err
    assert "note: the licence of google/none could not be looked up" in err
    assert "note: the card names no licence" in err


def test_a_readme_of_the_user_stays(
    hub: Hub, merged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = "---\nlicense: mit  # ours\nlanguage: [de]\n---\n\n# Mine\n\nNo more than this.\n"
    (merged / "README.md").write_text(mine)
    assert run_cli("push", merged, REPO) == 0
    card = hub.repos[REPO].files["README.md"].decode()
    assert card.startswith("---\nlicense: mit  # ours\nlanguage: [de]\n")
    assert card.endswith("---\n\n# Mine\n\nNo more than this.\n")
    found = metadata(card.encode())
    assert (found["license"], found["language"], found["library_name"]) == (
        "mit",
        ["de"],
        "transformers",
    )
    assert "note: README.md keeps license: 'mit' (this push would say 'gemma')" in (
        capsys.readouterr().err
    )
    assert (merged / "README.md").read_text() == mine


def test_what_was_written_on_the_hub_stays(hub: Hub, merged: Path) -> None:
    assert run_cli("push", merged, REPO, "--quiet") == 0
    repo = hub.repos[REPO]
    card = repo.files["README.md"].decode().replace("# tuned\n", "# tuned\n\nBy hand.\n")
    stale = card.replace("| rank | 2 |", "| rank | 99 |") + "\nBelow, by hand.\n"
    repo.commit(repo.files | {"README.md": stale.encode()})
    assert run_cli("push", merged, REPO, "--quiet") == 0
    assert repo.files["README.md"].decode() == card + "\nBelow, by hand.\n"


@pytest.mark.parametrize("several", [False, True])
def test_the_card_tells_of_validation(hub: Hub, model: Path, several: bool) -> None:
    """As `validate --json` prints results; their titles may name paths."""
    result = {
        "check": "logits",
        "title": "logits of /home/someone/merged against base",
        "passed": True,
        "summary": {"top-1": "100 %", "largest difference": "5.1e-05"},
        "findings": [],
    }
    failed = {**result, "title": "other", "passed": False}
    results = [result, failed]
    (model / "validation.json").write_text(json.dumps(results if several else result))
    assert run_cli("push", model, REPO, "--quiet") == 0
    files = hub.repos[REPO].files
    card = files["README.md"].decode()
    assert "## Validation\n\n### logits of merged against base\n" in card
    assert "| verdict | passed |\n| top-1 | 100 % |\n| largest difference | 5.1e-05 |" in card
    assert ("### other\n\n| | |\n|---|---|\n| verdict | FAILED |" in card) == several
    cleaned = {**result, "title": "logits of merged against base"}
    assert json.loads(files["validation.json"]) == ([cleaned, failed] if several else cleaned)


def test_an_adapter(hub: Hub, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    directory = tmp_path / "adapter"
    directory.mkdir()
    factors = factor_arrays(GEMMA3)
    save_file(dict(list(factors.items())[:2]), directory / "adapter_model.safetensors")
    config = {
        "base_model_name_or_path": "/data/base",
        "peft_type": "LORA",
        "r": 32,
        "lora_alpha": 64,
        "target_modules": ["v_proj", "q_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    words = ["push", directory, REPO, "--quiet", "--base-model", "google/gemma-3-1b-it"]
    assert run_cli(*words, "--license", "gemma") == 0
    files = hub.repos[REPO].files
    found = metadata(files["README.md"])
    assert found["library_name"] == "peft"
    assert found["base_model_relation"] == "adapter"
    assert found["license"] == "gemma"
    text = files["README.md"].decode()
    assert "| modules | q_proj, v_proj |" in text
    assert f"--lora-modules name={REPO} --max-lora-rank 32" in text
    pushed = json.loads(files["adapter_config.json"])
    assert pushed == {**config, "base_model_name_or_path": "google/gemma-3-1b-it"}


def test_an_orbax_checkpoint(hub: Hub, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", tunix_arrays(GEMMA3))
    assert run_cli("push", run, REPO, "--quiet") == 0
    repo = hub.repos[REPO]
    assert contents(run).items() <= repo.files.items()
    assert "layout of tunix" in repo.files["README.md"].decode()
    repo.commit(repo.files | {"0/model_params/d/old": b"x", "docs/a": b"y"})
    assert run_cli("push", run, REPO, "--quiet", "--yes") == 0
    assert "0/model_params/d/old" not in repo.files
    assert "docs/a" in repo.files


@pytest.mark.parametrize("inside", [True, False])
def test_links(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: bool
) -> None:
    secret = (model if inside else tmp_path) / "id_rsa"
    secret.write_text("a key")
    (model / "vocab.txt").symlink_to(secret)
    assert run_cli("push", model, REPO, "--quiet") == (0 if inside else 1)
    if inside:
        assert hub.repos[REPO].files["vocab.txt"] == b"a key"
    else:
        assert hub.repos == {}
        assert f"{model / 'vocab.txt'} is a link out of the directory" in capsys.readouterr().err


def test_a_link_to_a_folder_outside(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "a.txt").touch()
    (model / "more").symlink_to(tmp_path / "private")
    assert run_cli("push", model, REPO, "--quiet") == 1
    assert "is a link out of the directory" in capsys.readouterr().err
    assert hub.repos == {}


def test_what_is_left_out_is_said(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hidden files, and weights that the index does not name."""
    (model / ".env").write_text("KEY=1")
    (model / ".git").mkdir()
    (model / ".git" / "config").touch()
    (model / "model.safetensors").write_bytes(
        (model / "model-00001-of-00003.safetensors").read_bytes()
    )
    assert run_cli("push", model, REPO) == 0
    err = capsys.readouterr().err
    for name in (".env", ".git"):
        assert f"note: left out {name}: it is hidden" in err
    assert "note: ignored model.safetensors" in err
    assert not {".env", ".git/config", "model.safetensors"} & set(hub.repos[REPO].files)


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
