"""What is published of a ledger and of configs: names, not paths; all else as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemma_convert.convert.hub.public import public_config, public_ledger, public_path


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/runs/sft/1244", "1244"),
        ("runs/sft/1244/", "1244"),
        ("~/models/base", "base"),
        ("gs://company-bucket/runs/sft", "sft"),
        ("hf://google/gemma-3-1b@abc", "hf://google/gemma-3-1b@abc"),
        ("google/gemma-3-1b", "google/gemma-3-1b"),
        ("/", ""),
    ],
)
def test_paths(path: str, shown: str) -> None:
    assert public_path(path) == shown


def test_a_relative_path_that_exists_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "client-a" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_path("client-a/base") == "base"
    ledger = {"command": "gemma-convert push client-a/base --base=client-a/base org/name"}
    assert public_ledger(ledger)["command"] == "gemma-convert push base --base=base org/name"


def test_a_ledger_keeps_all_but_paths() -> None:
    kept = {
        "tensors": {"transformer/layer_0/attn/q_einsum.w": {"action": "copied", "shape": [2, 3]}},
        "dropped": {"a.b": "alpha / rank is 2/3, see https://example.org/a/b"},
        "numbers": [1, 2.5, None, True],
        "survival": {"relative_error": 0.25},
    }
    ledger = {
        **kept,
        "command": "gemma-convert orbax-to-hf '/my runs/a b' --out=/x/y --alpha 16",
        "inputs": [{"path": "/my runs/a b", "fingerprint": {"_METADATA": "sha256:0 size:1"}}],
        "notes": ["read /my runs/a b/step, not /root/other/file.txt, from gs://bucket/secret/z"],
    }
    assert public_ledger(ledger) == {
        **kept,
        "command": "gemma-convert orbax-to-hf 'a b' --out=y --alpha 16",
        "inputs": [{"path": "a b", "fingerprint": {"_METADATA": "sha256:0 size:1"}}],
        "notes": ["read a b/step, not file.txt, from z"],
    }


@pytest.mark.parametrize("key", ["_name_or_path", "name_or_path", "base_model_name_or_path"])
def test_configs(key: str) -> None:
    text = json.dumps({key: "/data/models/base", "other": "/stays/as/it/is", "größe": 1}).encode()
    named = json.loads(public_config(text, "google/gemma-3-1b"))
    assert named == {key: "google/gemma-3-1b", "other": "/stays/as/it/is", "größe": 1}
    assert json.loads(public_config(text, None))[key] == "base"


@pytest.mark.parametrize(
    "text", ['{"_name_or_path":  "google/gemma-3-1b"}', "{}", "[1]", "no json", '{"a": "/x/y"}']
)
def test_a_config_without_a_path_is_sent_byte_for_byte(text: str) -> None:
    assert public_config(text.encode(), "org/base") == text.encode()
