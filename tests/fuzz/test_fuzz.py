"""Damaged files by the thousand: each is read rightly or refused in one printable line.

A failure names its target and number; ``Fuzzed(target, directory).try_input(number)`` repeats it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_convert.convert.errors import GemmaConvertError
from gemma_convert.convert.readers import open_checkpoint
from tests.fuzz.guard import MEMORY, HangError, bounded_memory, bounded_time, check_message
from tests.fuzz.targets import TARGETS, Fuzzed, exercise, library_values, look, read_values, same


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.fuzz)])
def test_damaged_files(name: str, step: int, tmp_path: Path) -> None:
    fuzzed = Fuzzed(name, tmp_path)
    exercise(fuzzed.target, fuzzed.directory, fuzzed.sound)  # imports what it needs
    accepted, failure = 0, ""
    with bounded_memory():
        for number in range(0, TARGETS[name].count, step):
            try:
                accepted += fuzzed.try_input(number)
            except (Exception, HangError) as error:
                failure = f"{name} {number}: {type(error).__name__}: {error}"
                break
    assert not failure
    # Damage that is always told, or never, would test little.
    assert 0 < accepted < TARGETS[name].count // step


def test_there_are_as_many_as_promised() -> None:
    assert sum(target.count for target in TARGETS.values()) >= 20_000


COUNTS = st.integers(-1, 4) | st.integers(2**31 - 1, 2**64)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("F32", "BF16", "I8", "BOOL", "F4", "f32")),
        "shape": st.lists(COUNTS, max_size=3),
        "data_offsets": st.lists(COUNTS, min_size=2, max_size=2),
    },
    optional={"more": JSON},
)


@settings(max_examples=200)
@given(
    header=st.dictionaries(st.text(max_size=6) | st.just("w"), ENTRIES | JSON, max_size=3),
    data=st.binary(max_size=16),
)
def test_any_header(header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as directory, bounded_time():
        path = Path(directory, "x.safetensors")
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        try:
            checkpoint = open_checkpoint(path)
            look(checkpoint)
            found = read_values(checkpoint)
        except GemmaConvertError as error:
            check_message(error)
            return
        library = library_values(path)
        assert found.keys() == library.keys()
        assert all(same(found[name], library[name]) for name in found)


@settings(max_examples=100)
@given(JSON | st.dictionaries(st.sampled_from(("weight_map", "metadata")), JSON))
def test_any_index(value: Any) -> None:
    with tempfile.TemporaryDirectory() as directory, bounded_time():
        Path(directory, "model.safetensors.index.json").write_text(json.dumps(value))
        with pytest.raises(GemmaConvertError) as raised:
            open_checkpoint(directory)
        check_message(raised.value)


@pytest.mark.parametrize("seconds", [0.05])
def test_the_guard_ends_what_hangs(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.guard.SECONDS", seconds)
    with bounded_time(), pytest.raises(HangError):
        Event().wait()


def test_the_guard_bounds_memory() -> None:
    with bounded_memory(), pytest.raises(MemoryError):
        bytearray(2 * MEMORY)
