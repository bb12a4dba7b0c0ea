"""What is written past the page cache, and what is noticed of it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.writers import checked_file
from gemma_convert.convert.writers.checked_file import CheckedFile

CHUNK = 3 * 4096
SIZES = {
    "nothing": [],
    "less than a sector": [5, 0, 7],
    "a sector": [4096],
    "to the end of a chunk": [CHUNK - 9, 9],
    "beyond a chunk": [CHUNK, 1],
    "many chunks": [1, 5 * CHUNK + 3, 4095, CHUNK, 2 * CHUNK - 1, 77],
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_file, "CHUNK_BYTES", CHUNK)


def parts(sizes: Sequence[int]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, 256, size, np.uint8) for size in sizes]


def write(path: Path, sizes: Sequence[int]) -> tuple[int, int, str]:
    """Size, bytes said to be compared, digest."""
    with CheckedFile(path) as file:
        for i, part in enumerate(parts(sizes)):
            file.write(f"part {i}", part)
        digest = file.finish()
        return file.size, file.compared(), digest


def assert_written(path: Path, sizes: Sequence[int]) -> None:
    expected = b"".join(part.tobytes() for part in parts(sizes))
    digest = hashlib.sha256(expected).hexdigest()
    assert write(path, sizes) == (len(expected), len(expected), digest)
    assert path.read_bytes() == expected


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_the_bytes_and_their_digest(tmp_path: Path, sizes: Sequence[int]) -> None:
    assert_written(tmp_path / "file", sizes)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_without_direct_writes(
    tmp_path: Path, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    assert_written(tmp_path / "file", sizes)


def test_on_a_file_system_that_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the flag is set, or when something is written."""
    write, set_flags, direct, refused = os.pwrite, fcntl.fcntl, os.O_DIRECT, list[int]()

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if set_flags(descriptor, fcntl.F_GETFL) & direct:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert_written(tmp_path / "late", SIZES["many chunks"])
    assert refused == [0]

    def control(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return set_flags(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", control)
    assert_written(tmp_path / "early", SIZES["many chunks"])


def test_a_disk_that_takes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:4096], at))
    monkeypatch.setattr(os, "preadv", lambda file, data, at: read(file, [data[0][:4096]], at))
    assert_written(tmp_path / "file", SIZES["many chunks"])


@pytest.mark.parametrize("position", [0, CHUNK - 1, CHUNK, 3 * CHUNK + 5, 4 * CHUNK])
def test_a_bit_that_flips(tmp_path: Path, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found on the disk, and told by the name of what it belongs to."""
    sizes = [CHUNK - 1, 2 * CHUNK, CHUNK + 5, 1, CHUNK]
    owner = int(np.searchsorted(np.cumsum(sizes), position, side="right"))
    write_at = checked_file.write_at

    def flipped(descriptor: int, data: memoryview, offset: int) -> None:
        wrong = bytearray(data)
        if 0 <= position - offset < len(wrong):
            wrong[position - offset] ^= 4
        write_at(descriptor, memoryview(wrong), offset)

    monkeypatch.setattr(checked_file, "write_at", flipped)
    with pytest.raises(OutputError, match=f"part {owner}: the values read back differ"):
        write(tmp_path / "file", sizes)


def test_bytes_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_at = checked_file.write_at
    monkeypatch.setattr(checked_file, "write_at", lambda file, data, at: write_at(file, b"", at))
    with CheckedFile(tmp_path / "file") as file:
        file.write("ones", np.ones(CHUNK + 1, np.uint8))
        with pytest.raises(OutputError, match="ones: the values read back differ"):
            file.finish()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if offset + len(data) > 2 * CHUNK + 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", SIZES["many chunks"])


def test_no_other_file_is_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        CheckedFile(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
