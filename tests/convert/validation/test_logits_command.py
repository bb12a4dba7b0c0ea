"""Before and around two engines: prompts and tokenizers, what cannot run, options, JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.validation import prompts as prompts_module
from gemma_convert.convert.validation.engines.choose import Options
from gemma_convert.convert.validation.setup_logits import Request, compare_logits
from tests.checkpoints import run_cli
from tests.logits_pairs import compared, norm_off_by_one, spoilt
from tests.tiny_tokenizer import save_tokenizer

# Tunix 0.1.7 calls deprecated parts of jax 0.10 and flax 0.12.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:tunix\."),
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:qwix\."),
    pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning"),
]


def test_a_prompt_without_bos_is_refused(deep: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps([{"name": "bare", "ids": [7, 8, 9]}]))
    with pytest.raises(InputError, match="prompt 'bare': expected exactly one BOS"):
        compared(deep, deep, tmp_path / "p.json")


def test_a_tokenizer_that_lost_its_bos_is_found(deep: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps([{"name": "text", "text": "Water boils"}]))
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for directory, bos in ((right, True), (wrong, False)):
        shutil.copytree(deep, directory)
        save_tokenizer(directory, bos=bos)
    assert compared(right, right, tmp_path / "p.json").passed
    (finding,) = compared(right, wrong, tmp_path / "p.json").findings
    assert finding.where == str(wrong)
    assert finding.what == "its tokenizer does not put exactly one BOS (2) before text"


def test_a_tokenizer_with_other_ids_is_found(deep: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps([{"name": "text", "text": "Water boils"}]))
    for directory, shift in (("right", 0), ("wrong", 1)):
        shutil.copytree(deep, tmp_path / directory)
        save_tokenizer(tmp_path / directory, shift=shift)
    found = compared(tmp_path / "right", tmp_path / "wrong", tmp_path / "p.json").findings
    assert [f.what for f in found] == [
        f"its tokenizer gives other ids than that of {tmp_path / 'right'}"
    ]


def test_the_built_in_prompts(deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "LONG", 300)
    shutil.copytree(deep, tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    request = Request(
        str(tmp_path / "model"), str(tmp_path / "model"), Options(), Options(), positions=16
    )
    lines: list[str] = []
    result = compare_logits(request, lines.append)
    names = ["short", "code", "languages", "chat", "window", "long"]
    assert [p["prompt"] for p in result.data["prompts"]] == names
    assert result.data["prompts"][-1]["tokens"] == 300
    assert len(lines) == 12
    assert lines[0] == f"transformers {tmp_path / 'model'}: short, 4 tokens"


def test_without_tokenizer_or_prompts_it_is_an_error(deep: Path) -> None:
    with pytest.raises(InputError, match="has a tokenizer; give a directory with one as --base"):
        compare_logits(Request(str(deep), str(deep), Options(), Options()))


def test_weights_that_transformers_misses_are_an_error(
    deep: Path, few: Path, tmp_path: Path
) -> None:
    wrong = spoilt(deep, tmp_path / "wrong", lambda w: w.__delitem__("model.norm.weight"))
    with pytest.raises(InputError, match=r"transformers says missing keys: model\.norm\.weight"):
        compared(wrong, deep, few)


def test_the_command(
    deep: Path, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = spoilt(deep, tmp_path / "wrong", norm_off_by_one)
    words = ["validate", "logits", deep]
    assert run_cli(*words, deep, "--prompts", few) == 0
    assert "PASSED" in capsys.readouterr().out
    assert run_cli(*words, wrong, "--prompts", few, "--layers", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["findings"][0]["where"] == "prompt few, layer 7"
    loose = ["--max-abs", "100", "--mean-kl", "100", "--top1", "0"]
    assert run_cli(*words, wrong, "--prompts", few, *loose) == 0


def test_a_model_that_computes_nan_fails_in_strict_json(
    deep: Path, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_one(weights: dict[str, Array]) -> None:
        weights["model.layers.7.input_layernorm.weight"][3] = np.nan

    wrong = spoilt(deep, tmp_path / "wrong", break_one)
    report = tmp_path / "report.html"
    words = ["validate", "logits", deep, wrong, "--prompts", few, "--layers", "--report", report]
    capsys.readouterr()
    assert run_cli(*words, "--json") == 1
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["findings"] == [
        {
            "where": "prompt few, layer 7",
            "what": "B gives NaN or infinite logits at position 0, the first of 14",
        }
    ]
    assert told["worst"]["mean_kl"] == "NaN"
    assert told["prompts"][0]["first_diverging"] == "layer 7"
    assert "the first beyond it: layer 7" in told["summary"]["hidden states"]
    assert "<polyline" in report.read_text()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--max-abs", "nan", "'nan' is not a number 0 or more"),
        ("--max-abs", "-1", "'-1' is not a number 0 or more"),
        ("--mean-kl", "-inf", "'-inf' is not a number 0 or more"),
        ("--mean-kl", "x", "'x' is not a number"),
        ("--top1", "7", "'7' is not a number from 0 to 1"),
    ],
)
def test_limits_that_are_none(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("validate", "logits", "a", "b", option, value) == 2
    assert said in capsys.readouterr().err


def test_ids_that_a_model_does_not_know_are_refused(deep: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps([{"name": "far", "ids": [2, 7, 512, 9]}]))
    with pytest.raises(InputError) as caught:
        compared(deep, deep, tmp_path / "p.json")
    assert str(caught.value).startswith(
        f"prompt 'far': token id 512, and {deep} has 509 tokens; the tokenizer, or the ids"
    )


def test_quiet_is_quiet(deep: Path, few: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bars and warnings of transformers too."""
    check = ["validate", "logits", deep, deep, "--prompts", few]
    assert run_cli(*check, "--low-memory", "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    assert run_cli(*check) == 0
    assert "Loading" not in capfd.readouterr().err
