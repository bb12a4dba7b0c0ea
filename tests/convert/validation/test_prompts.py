"""Prompts: the built-in set, files, and exactly one BOS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.validation.prompt_file import from_file
from gemma_convert.convert.validation.prompt_texts import long_text
from gemma_convert.convert.validation.prompts import (
    LONG,
    Prompt,
    adds_bos,
    built_in,
    check_bos,
    limited,
)
from tests.tiny_tokenizer import BOS, save_tokenizer


def tokenizer(directory: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    save_tokenizer(directory, **options)
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("bos", [False, True])
def test_the_built_in_set_has_one_bos_whatever_the_tokenizer_adds(
    bos: bool, tmp_path: Path
) -> None:
    prompts = {p.name: p for p in built_in(tokenizer(tmp_path, bos=bos), BOS, 512)}
    assert [*prompts] == ["short", "code", "languages", "chat", "window", "long"]
    check_bos(list(prompts.values()), BOS)
    assert len(prompts["short"].ids) == 4
    assert len(prompts["window"].ids) == 576
    assert len(prompts["long"].ids) == LONG > 2000


def test_a_window_beyond_the_long_prompt_makes_it_longer(tmp_path: Path) -> None:
    prompts = {p.name: p for p in built_in(tokenizer(tmp_path, chat=False), BOS, 4096)}
    assert [*prompts] == ["short", "code", "languages", "long"]
    assert len(prompts["long"].ids) == 4160


def test_the_long_text_does_not_repeat_itself() -> None:
    lines = long_text(4200).splitlines()
    assert sum(len(line.split()) for line in lines) >= 4200
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ((), "found 0, it begins with []"),
        ((5, 6), "found 0, it begins with [5, 6]"),
        ((2, 2, 5), "found 2, it begins with [2, 2]"),
        ((5, 2), "found 1, it begins with [5, 2]"),
    ],
)
def test_anything_but_one_bos_is_refused(ids: tuple[int, ...], found: str) -> None:
    check_bos([Prompt("right", (2, 5, 6))], 2)
    with pytest.raises(InputError) as caught:
        check_bos([Prompt("right", (2, 5, 6)), Prompt("wrong", ids)], 2)
    text = str(caught.value)
    assert text.startswith("prompt 'wrong': expected exactly one BOS (2), and that first")
    assert found in text


def test_whether_a_tokenizer_adds_a_bos(tmp_path: Path) -> None:
    assert adds_bos(tokenizer(tmp_path / "with"), BOS)
    assert not adds_bos(tokenizer(tmp_path / "without", bos=False), BOS)


def test_files(tmp_path: Path) -> None:
    entries = [
        {"name": "text", "text": "Water boils"},
        {"name": "ids", "ids": [2, 9, 8]},
        {"messages": [{"role": "user", "content": "boils"}]},
    ]
    listed, lines = tmp_path / "p.json", tmp_path / "p.jsonl"
    listed.write_text(json.dumps(entries))
    lines.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    words = tokenizer(tmp_path)
    for path, name in ((listed, "2"), (lines, "3")):  # the entry, or the line
        prompts = from_file(path, words, BOS)
        assert prompts[:2] == [Prompt("text", (2, 5, 6)), Prompt("ids", (2, 9, 8))]
        assert prompts[2].name == name
        assert (prompts[2].ids[0], prompts[2].ids[-1]) == (2, 6)


def test_a_file_may_begin_as_windows_writes_it(tmp_path: Path) -> None:
    for text in ('[{"name": "x", "ids": [2, 9]}]', '{"name": "x", "ids": [2, 9]}\r\n\r\n'):
        (tmp_path / "p.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert from_file(tmp_path / "p.json", None, BOS) == [Prompt("x", (2, 9))]


WRONG = {
    "{not json": "line 1: neither the file nor this line is JSON",
    '{"text": "a"}\n\n{"text": }': "line 3: neither the file nor this line is JSON",
    '{"text": "a"}\n["a"]': r"line 2: expected an object, found \['a'\]",
    '["a"]': "entry 0: expected an object, found 'a'",
    "": "expected prompts, found none",
    "[]": "expected prompts, found none",
    "3": "p.json: expected an object, found 3",
    "[" * 100_000: "line 1: neither the file nor this line is JSON: nested too deep",
    '[{"name": "x"}]': r"expected one of \"text\", \"messages\" and \"ids\", found \['name'\]",
    '[{"text": "a", "ids": [2]}]': r"entry 0: expected one of .*, found \['text', 'ids'\]",
    '[{"name": [], "text": "a"}]': r"name: expected a string, found \[\]",
    '[{"text": 5}]': "text: expected a string, not empty, found 5",
    '[{"text": ""}]': "text: expected a string, not empty, found ''",
    '[{"messages": ["x"]}]': r"messages: expected a list of {\"role\": .*, found \['x'\]",
    '[{"messages": [{"role": "user"}]}]': "messages: expected a list of",
    '[{"messages": []}]': r"messages: expected a list of .*, found \[\]",
    r'[{"text": "x\ud800"}]': "entry 0: text: expected Unicode, no half of a surrogate",
    r'[{"name": "\udfff", "ids": [2]}]': "entry 0: name: expected Unicode, no half of a surrogate",
    r'[{"messages": [{"role": "user", "content": "\ud800"}]}]': "entry 0: messages: the chat",
    '[{"ids": [2, "x"]}]': "ids: expected a list of token ids, 0 or more, found",
    '[{"ids": [2, -1]}]': "ids: expected a list of token ids",
    '[{"ids": [true]}]': "ids: expected a list of token ids",
    '[{"ids": []}]': "ids: expected a list of token ids",
    '[{"ids": "2"}]': "ids: expected a list of token ids",
    '[{"name": "x", "text": "no tokenizer"}]': "neither side has a tokenizer",
}


@pytest.mark.parametrize("text", WRONG)
def test_bad_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    words = None if "no tokenizer" in text else tokenizer(tmp_path)
    with pytest.raises(InputError, match=WRONG[text]) as caught:
        from_file(path, words, BOS)
    assert str(caught.value).startswith(str(path))


def test_a_template_that_refuses(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps([{"messages": [{"role": "user", "content": "boils"}]}]))
    words = tokenizer(tmp_path)
    words.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="entry 0: messages: the chat template refuses it: Templ"):
        from_file(path, words, BOS)
    with pytest.raises(InputError, match="cannot read"):
        from_file(tmp_path / "nothing.json", words, BOS)


def test_what_is_too_long_is_left_out_and_said() -> None:
    prompts = [Prompt("a", (2, 3)), Prompt("b", (2, 3, 4, 5))]
    kept, notes = limited(prompts, {"one": None, "other": 3})
    assert [p.name for p in kept] == ["a"]
    assert notes == ["prompt 'b' was left out: 4 tokens, other takes 3"]
