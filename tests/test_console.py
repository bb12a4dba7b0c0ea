"""Sizes as people write them, progress where there is no terminal, strict JSON."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest

from gemma_convert import console
from gemma_convert.console import ByteSize, print_json, progress, size_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 kb", 1500),
        ("2g", 2 * 10**9),
        ("3Ki", 3072),
        ("7", 7),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert ByteSize().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "0.1", "5TB5", "1e9", "5 G B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size such as 5GB or 512MiB"):
        ByteSize().convert(text, None, None)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (536_196_352, "536.2 MB")]
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


def test_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 5.0, 20.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with progress("converting", 4 * 10**9, quiet=False) as advance:
        advance(10**9)
        assert capsys.readouterr() == ("", "")
        advance(10**9)
    line = "converting: 2.00 of 4.00 GB, 100 MB/s, 20 s left\n"
    assert capsys.readouterr() == ("", line)


def test_quiet_has_no_progress(capsys: Any) -> None:
    with progress("converting", 1, quiet=True) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")


def test_json_has_no_number_that_is_not_one(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": [float("nan"), 1.5, (float("-inf"), True)], "b": {"c": float("inf")}}
    print_json(value)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert told == {"a": ["NaN", 1.5, ["-Infinity", True]], "b": {"c": "Infinity"}}
