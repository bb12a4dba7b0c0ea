"""config.json and the side files of a merge, where no ledger has their digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    base_arrays,
    factor_arrays,
    run_cli,
    write_base,
    write_run,
)

CONFIG = {
    **GEMMA3,
    "hidden_size": 12,  # a multiple of the heads, as transformers wants it
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 21,
    "sliding_window": 5,
}
FILES = {
    "generation_config.json": json.dumps({"eos_token_id": [1, 106], "top_k": 64}),
    "chat_template.jinja": "{{ messages }}",
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A merge whose ledger is gone."""
    base = write_base(tmp_path / "base", CONFIG, base_arrays(CONFIG, "model."), files=FILES)
    run = write_run(tmp_path / "run", factor_arrays(CONFIG))
    made = tmp_path / "out"
    words = ["orbax-to-hf", run, "--base", base, "--out", made, "--alpha", ALPHA, "--quiet"]
    assert run_cli(*words) == 0
    (made / "conversion.json").unlink()
    return made


def findings(out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What `validate merged` finds, and that it exits 1 if that is anything."""
    capsys.readouterr()
    words = ["--base", out.parent / "base", "--adapter", out.parent / "run", "--alpha", ALPHA]
    code = run_cli("validate", "merged", out, *words, "--json")
    said = capsys.readouterr()
    assert said.out, said.err
    told = json.loads(said.out)["findings"]
    assert code == (1 if told else 0)
    return {f"{row['where']} {row['what'].split()[0]}": row["what"] for row in told}


def changed(out: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads((out / name).read_text())
    change(value)
    (out / name).write_text(json.dumps(value))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "theta": ({"rope_theta": 10_000.0}, "rope_theta is 10000.0, expected 1000000.0"),
    "scale": ({"query_pre_attn_scalar": 7}, "query_pre_attn_scalar is 7, expected 21"),
    "dtype": ({"torch_dtype": "float32"}, "dtype is 'float32', expected 'bfloat16'"),
    "true for 1": ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected True"),
    "a cap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, expected None"),
    "a null": ({"rms_norm_eps": None}, "rms_norm_eps is None, expected not there"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_key_is_a_finding(
    which: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, text = WRONG[which]
    changed(out, "config.json", lambda config: config.update(wrong))
    assert text in findings(out, capsys).values()


def test_a_key_that_is_left_out_has_its_default(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(out, "config.json", lambda config: config.pop("query_pre_attn_scalar"))
    assert findings(out, capsys) == {
        "config.json query_pre_attn_scalar": "query_pre_attn_scalar is 256, expected 21"
    }


def test_other_spellings_of_the_same_pass(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As transformers saves it: RoPE by kind of layer, defaults spelled out, dtype renamed."""
    from transformers import AutoConfig

    assert findings(out, capsys) == {}
    AutoConfig.from_pretrained(out).save_pretrained(out)
    assert "rope_theta" not in json.loads((out / "config.json").read_text())
    changed(out, "generation_config.json", lambda config: config.update(transformers_version="9"))
    assert findings(out, capsys) == {}
    changed(
        out,
        "config.json",
        lambda config: config["rope_parameters"]["full_attention"].update(rope_theta=1e4),
    )
    assert list(findings(out, capsys).values()) == [
        "rope_parameters.full_attention.rope_theta is 10000.0, expected 1000000.0"
    ]


def test_side_files(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(out, "generation_config.json", lambda config: config.update(eos_token_id=[1]))
    (out / "chat_template.jinja").write_text("{{ message }}")
    assert list(findings(out, capsys).values()) == [
        "not the base's: 13 bytes, expected 14 and other ones",
        "eos_token_id is [1], expected [1, 106]",
    ]
    (out / "chat_template.jinja").unlink()
    (out / "generation_config.json").write_text("[]")
    assert list(findings(out, capsys).values()) == [
        "missing; the base has it",
        f"{out / 'generation_config.json'} must be a JSON object, found list; download it again",
    ]
