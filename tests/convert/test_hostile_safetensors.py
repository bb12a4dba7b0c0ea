"""Safetensors files with hostile headers, cut short or changed: each is refused in one line."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_checkpoint, open_safetensors, read_file
from tests.safetensors_files import GOLDEN, LFS, TWO, entry, model, raw


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"\xff\xfe", b"", "is not UTF-8: invalid start byte; download it again"),
        (b'{"a": ', b"", "is not valid JSON"),
        (b"[" * 100_000, b"", "is not valid JSON: maximum recursion depth"),
        (b"[1, 2]", b"", "must be a JSON object, found list"),
        (
            b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
            b'"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
            b"12",
            "holds the key 'a' twice",
        ),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map strings to strings"),
        ({"a": 7}, b"", "tensor 'a' needs dtype, shape and data_offsets"),
        ({"a": {"dtype": "U8", "shape": [2]}}, b"12", "needs dtype, shape and data_offsets"),
        ({"a": entry(dtype="Q9")}, b"12", "tensor 'a': unknown safetensors dtype 'Q9'; known are"),
        ({"a": entry(dtype="F4")}, b"12", "unknown safetensors dtype 'F4'"),
        ({"a": entry(dtype=["U8"])}, b"12", "dtype that is no string"),
        ({"a": entry(shape=[-2])}, b"12", r"shape that is no list of sizes: \[-2\]"),
        ({"a": entry(shape=[2.0])}, b"12", r"shape that is no list of sizes: \[2\.0\]"),
        ({"a": entry(shape=[True, 2])}, b"12", r"no list of sizes: \[True, 2\]"),
        ({"a": entry(shape="2")}, b"12", "no list of sizes: '2'"),
        ({"a": entry(shape=[0, 2**62, 2], offsets=[0, 0])}, b"", "beyond what can be addressed"),
        ({"a": entry(shape=[1] * 33, offsets=[0, 1])}, b"1", "beyond what can be addressed"),
        ({"a": entry(offsets=[2, 0])}, b"12", r"not \[begin, end\]: \[2, 0\]"),
        ({"a": entry(offsets=[-2, 0])}, b"12", r"not \[begin, end\]: \[-2, 0\]"),
        ({"a": entry(offsets=[0, 2.0])}, b"12", r"not \[begin, end\]: \[0, 2\.0\]"),
        ({"a": entry(offsets=[0, 1, 2])}, b"12", r"not \[begin, end\]"),
        (
            {"a": entry(dtype="F32")},
            b"12",
            r"shape \[2\] and dtype F32 needs 8 bytes, its data_offsets \[0, 2\] give 2",
        ),
        (
            {"a": entry(), "b": entry(offsets=[1, 3])},
            b"123",
            "tensor 'b' overlaps 'a': it begins at byte 129, expected 130",
        ),
        ({"a": entry(), "b": entry()}, b"12", "tensor 'b' overlaps 'a'"),
        ({"a": entry(), "b": entry(offsets=[3, 5])}, b"12345", "tensor 'b' leaves a hole after"),
        ({"a": entry(offsets=[1, 3])}, b"123", "tensor 'a' leaves a hole after the header"),
        (
            {"a": entry()},
            b"12345",
            "has 3 bytes after its last tensor: expected 70 bytes, found 73",
        ),
        ({"a": entry()}, b"1", "cut short: expected at least 70 bytes, found 69; download it"),
        ({"a": entry(offsets=[0, 2**60], shape=[2**60])}, b"12", "cut short: expected at least"),
        ({"a\0b": entry()}, b"12", r"tensor 'a\\x00b' has a name that is empty or holds control"),
        ({"a\nb": entry()}, b"12", r"tensor 'a\\nb' has a name"),
        ({"": entry()}, b"12", "tensor '' has a name that is empty"),
        (b'{"\\ud800": {}}', b"12", "holds half a surrogate pair, no character"),
    ],
)
def test_hostile_header(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_file(raw(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [100_000_001, 2**60, 2**64 - 1])
def test_header_length_beyond_the_format(tmp_path: Path, length: int) -> None:
    path = raw(tmp_path / "x.safetensors", {"a": entry()}, b"12", length)
    with pytest.raises(
        InputError,
        match=f"not a safetensors file: its first 8 bytes give a header of {length} bytes, "
        "the format allows 100000000; download it again",
    ):
        read_file(path)


@pytest.mark.parametrize("value", ["[]", "{}", "1", '"a":0'])
def test_a_header_of_many_values_is_refused_before_it_is_parsed(tmp_path: Path, value: str) -> None:
    """An empty list has 2 bytes in the file and some 60 in memory."""
    held = "{%s}" if ":" in value else "[%s]"
    text = '{"a":' + held % ",".join([value] * 1_000_000) + "}"
    path = raw(tmp_path / "x.safetensors", text.encode())
    tracemalloc.start()
    with pytest.raises(InputError) as raised:
        read_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = sum(map(text.count, "[{,"))
    assert str(raised.value) == (
        f"header of {path} has {found} brackets and commas, more than 1000000; "
        "this is not such a file"
    )
    assert peak < 2 * len(text)


def test_a_header_of_ten_times_the_tensors_of_any_gemma(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.mlp.experts.gate_up_proj" for i in range(12_000)]
    header = {
        name: entry(shape=[1, 2, 1], offsets=[2 * i, 2 * i + 2]) for i, name in enumerate(names)
    }
    path = raw(tmp_path / "x.safetensors", header, bytes(2 * len(names)))
    assert list(read_file(path)) == names


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    path = raw(tmp_path / "x.safetensors", b"{}", b"", 1000)
    with pytest.raises(InputError, match="expected at least 1008 bytes, found 10; download it"):
        read_file(path)
    path.write_bytes(b"\0\0\0")
    with pytest.raises(InputError, match="expected at least 8 bytes, found 3"):
        read_file(path)


def test_golden_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for size in range(len(GOLDEN)):
        path.write_bytes(GOLDEN[:size])
        with pytest.raises(InputError, match=f"cut short: expected .* bytes, found {size}"):
            read_file(path)


def test_empty_header_is_an_empty_checkpoint(tmp_path: Path) -> None:
    assert len(read_file(raw(tmp_path / "x.safetensors", {}))) == 0


def test_git_lfs_pointer(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO)
    message = r"is a Git LFS pointer, not the file itself; run `git lfs pull`"
    for name in ("b.safetensors", "tokenizer.json", "config.json"):
        kept = (directory / name).read_bytes() if name == "b.safetensors" else None
        (directory / name).write_bytes(LFS)
        with pytest.raises(InputError, match=f"{name} {message}"):
            open_safetensors(directory)
        (directory / name).unlink()
        if kept:
            (directory / name).write_bytes(kept)
    (directory / "b.safetensors").write_bytes(LFS)
    with pytest.raises(InputError, match=message):
        open_checkpoint(directory / "b.safetensors")


def test_file_changed_since_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOLDEN)
    tensor = read_file(path)["b"]
    os.truncate(path, len(GOLDEN) - 7)
    with pytest.raises(InputError, match=r"tensor 'b': .*x\.safetensors was changed while"):
        tensor.numpy()
    path.unlink()
    with pytest.raises(InputError, match=r"tensor 'b': .* cannot be read: No such file"):
        tensor.numpy()


def test_short_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOLDEN)
    tensor = read_file(path)["a"]
    tensor.offset += 2  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="ends at byte 122, 2 bytes too early"):
        tensor.numpy()


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*: No such file or directory; check the"):
        read_file(tmp_path / "x.safetensors")
