"""What of a directory is pushed: adapters, Orbax checkpoints, links, what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import GEMMA3, factor_arrays, run_cli, tunix_arrays, write_run
from tests.hub_push import REPO, contents, metadata
from tests.hub_server import Hub

# huggingface_hub 1.33 hands an open file to httpx in the older of two ways.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<:DeprecationWarning")


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


def test_a_config_of_many_values(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = model / "tokenizer_config.json"
    config.write_text('{"a": [' + "1," * 1_000_000 + "1]}")
    assert run_cli("push", model, REPO, "--dry-run") == 1
    assert capsys.readouterr().err == (
        f"error: {config} has 1000002 brackets and commas, more than 1000000; "
        "this is not such a file\n"
    )


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


_FILES = {"output": {"files": {}}}


@pytest.mark.parametrize(
    "ledger",
    [
        {"output": None},
        {"tool": "gemma-convert 0.1.0", "output": None},
        {"tool": "gemma-convert 0.1.0", "output": {"files": {"model.safetensors": "x"}}},
        {"tool": "gemma-convert 0.1.0", **_FILES, "inputs": ["a"]},
        {"tool": "gemma-convert 0.1.0", **_FILES, "adapters": {"a": "b"}},
        {"tool": "gemma-convert 0.1.0", **_FILES, "model": None},
        *(
            {"tool": "gemma-convert 0.1.0", **_FILES, **changed}
            for changed in (
                {"adapters": [{"ranks": 5}]},
                {"adapters": [{"ranks": [{}], "scales": [1.5]}]},
                {"adapters": [{"ranks": [2], "scales": ["x"]}]},
                {"adapters": [{"weight": [2]}]},
                {"model": {"family": {"a": 1}}},
                {"counts": {"copied": {}}},
                {"inputs": [{"path": 5, "format": "safetensors"}]},
                {"output": {"files": {"model.safetensors": {"sha256": [1]}}}},
                {"survival": {"relative_error": "x"}, "adapters": [{}]},
            )
        ),
    ],
)
def test_what_is_no_ledger_of_ours_is_a_file_like_others(
    hub: Hub, model: Path, ledger: dict[str, object]
) -> None:
    (model / "conversion.json").write_text(json.dumps(ledger))
    assert run_cli("push", model, REPO, "--quiet") == 0
    files = hub.repos[REPO].files
    assert json.loads(files["conversion.json"]) == ledger
    assert b"## Conversion" not in files["README.md"]


@pytest.mark.parametrize(
    "verdict",
    [
        *({"title": "x", "passed": passed} for passed in ([], {}, "yes", 1)),
        *({"title": {}, "passed": True}, {"summary": 5}, {"check": 7}, [5], [{}, {"title": 1}]),
    ],
)
def test_what_is_no_verdict_of_ours_is_not_in_the_card(
    hub: Hub, model: Path, verdict: object
) -> None:
    (model / "validation.json").write_text(json.dumps(verdict))
    assert run_cli("push", model, REPO, "--quiet") == 0
    files = hub.repos[REPO].files
    assert json.loads(files["validation.json"]) == verdict
    assert b"## Validation" not in files["README.md"]


@pytest.mark.parametrize("path", ["x" * 300, "/" + "x" * 5000, "a\0b"])
def test_a_ledger_whose_base_cannot_be(hub: Hub, model: Path, path: str) -> None:
    inputs = [{"path": path, "format": "safetensors"}]
    ledger = {"tool": "gemma-convert 0.1.0", **_FILES, "inputs": inputs}
    (model / "conversion.json").write_text(json.dumps(ledger))
    assert run_cli("push", model, REPO, "--quiet") == 0
    assert b"license" not in hub.repos[REPO].files["README.md"].split(b"---")[1]


@pytest.mark.parametrize("targets", [5, ["q_proj", 5], [{}], {"q_proj": 1}, None])
def test_an_adapter_whose_targets_are_no_names(hub: Hub, tmp_path: Path, targets: object) -> None:
    from safetensors.numpy import save_file

    save_file(factor_arrays(GEMMA3), tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert run_cli("push", tmp_path, REPO, "--dry-run", "--quiet") == 0


def test_a_command_that_no_shell_would_read(hub: Hub, model: Path) -> None:
    ledger = {"tool": "gemma-convert 0.1.0", **_FILES, "command": "it's /home/me/run"}
    (model / "conversion.json").write_text(json.dumps(ledger))
    assert run_cli("push", model, REPO, "--quiet") == 0
    pushed = json.loads(hub.repos[REPO].files["conversion.json"])
    assert "/home" not in pushed["command"]


def test_a_readme_in_another_encoding(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "README.md").write_bytes("ein Modell für".encode("latin-1"))
    assert run_cli("push", model, REPO, "--quiet") == 1
    expected = f"error: {model}/README.md is not UTF-8 from byte 12 on; save it as UTF-8"
    assert capsys.readouterr().err.startswith(expected)
    assert hub.repos == {}


def test_a_readme_on_the_hub_in_another_encoding(
    hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("push", model, REPO, "--quiet") == 0
    repo = hub.repos[REPO]
    repo.commit(repo.files | {"README.md": "ein Modell für".encode("latin-1")})
    assert run_cli("push", model, REPO, "--quiet") == 1
    expected = f"error: {REPO}: README.md is not UTF-8 from byte 12 on; save it as UTF-8"
    assert capsys.readouterr().err.startswith(expected)
