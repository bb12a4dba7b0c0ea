"""The model card of a push, and what of the ledger is published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import run_cli
from tests.hub_push import REPO, metadata
from tests.hub_server import Hub

# huggingface_hub 1.33 hands an open file to httpx in the older of two ways.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")


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


@pytest.mark.parametrize("stated", ["[[gemma]]", "{a: gemma}", "3", "true", "x" * 1001, "[]"])
def test_a_licence_is_a_short_text_or_a_list_of_some(
    hub: Hub, merged: Path, tmp_path: Path, stated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"---\nlicense: {stated}\nlicense_name: [one, two]\n---\n"
    (tmp_path / "secret place" / "base" / "README.md").write_text(text)
    assert run_cli("push", merged, REPO, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)["metadata"]
    assert "license" not in found
    assert found["license_name"] == ["one", "two"]


def test_a_card_of_the_base_with_aliases_is_refused(
    hub: Hub, merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "secret place" / "base" / "README.md"
    readme.write_text("---\nfirst: &x [gemma]\nlicense: *x\n---\n")
    assert run_cli("push", merged, REPO, "--dry-run") == 1
    assert capsys.readouterr().err == (
        f"error: {readme}: its metadata uses the alias *x; write its value instead\n"
    )
    assert run_cli("push", merged, REPO, "--dry-run", "--license", "gemma") == 0


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
