"""The safetensors writer against the safetensors library, and its own check of what it wrote."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.read_ahead import read_ahead
from gemma_convert.convert.tensor import Array, ArrayTensor, Tensor
from gemma_convert.convert.writers import checked_file
from gemma_convert.convert.writers import safetensors as writer
from gemma_convert.convert.writers.check_shard import check_shard
from gemma_convert.convert.writers.hf import write_hf
from gemma_convert.convert.writers.safetensors import shard, write_shard
from tests.checkpoints import BF16, assert_same_bits, memory, read_hf

INDEX = "model.safetensors.index.json"


def ignore(nbytes: int) -> None:
    """Progress that nobody watches."""


def lazy(values: dict[str, Array]) -> dict[str, Tensor]:
    return {name: ArrayTensor(array) for name, array in values.items()}


def write(directory: Path, values: dict[str, Array], max_bytes: int = 10**9) -> dict[str, Array]:
    for part in shard(lazy(values), max_bytes):
        write_shard(directory, part, ignore)
    return read_hf(directory)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4.0).reshape(2, 2).T,
        np.arange(8, dtype=np.float32).reshape(2, 4)[:, ::2],
        np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16).T,
        np.arange(24, dtype=np.float16).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(6, dtype=np.float32)[::-1],
        np.broadcast_to(np.float32(1.5), (3, 5)),
        np.array(2.5, np.float32),
        np.zeros((0, 3), np.float32),
        np.array([0x7FC1, 0xFF81, 0x8000], np.uint16).view(BF16),
        np.arange(5, dtype=np.int64),
    ],
    ids=["T", "stride", "bf16.T", "3d", "reversed", "broadcast", "scalar", "empty", "nan", "int"],
)
def test_strided_arrays(tmp_path: Path, array: Array) -> None:
    """F01: the values, not the memory behind them."""
    found = write(tmp_path, {"x": array})["x"]
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tolist() == array.tolist() or np.isnan(array.astype(np.float32)).any()
    assert found.tobytes() == np.ascontiguousarray(array).tobytes()


def test_the_transposed_square_by_hand(tmp_path: Path) -> None:
    found = write(tmp_path, {"x": np.arange(4.0).reshape(2, 2).T})
    assert found["x"].tolist() == [[0.0, 2.0], [1.0, 3.0]]


@pytest.mark.parametrize("block_bytes", [2, 7, 64])
def test_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(
        writer,
        "read_ahead",
        lambda tensors, threads: read_ahead(tensors, block_bytes=block_bytes, threads=threads),
    )
    values = {
        "a": np.arange(105, dtype=np.float32).reshape(3, 5, 7).transpose(2, 0, 1),
        "b": np.arange(10).astype(BF16),
    }
    assert_same_bits(write(tmp_path, values), values)


def test_every_tensor_is_aligned_in_a_file_of_mixed_dtypes(tmp_path: Path) -> None:
    values = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.arange(3, dtype=np.float32),
        "c": np.arange(5).astype(BF16),
        "d": np.arange(3, dtype=np.float64),
    }
    assert_same_bits(write(tmp_path, values), values)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, array in values.items():
        assert (8 + length + header[name]["data_offsets"][0]) % array.dtype.itemsize == 0


def test_shards_hold_at_most_the_limit_each_in_the_order_given() -> None:
    sizes = {"a": 4, "b": 7, "c": 1, "d": 3, "e": 20, "f": 2, "g": 9}
    parts = shard(lazy({n: np.zeros(size, np.uint8) for n, size in sizes.items()}), 11)
    assert [list(part.tensors) for part in parts] == [["a", "b"], ["c", "d"], ["e"], ["f", "g"]]
    assert [part.name for part in parts] == [f"model-0000{i}-of-00004.safetensors" for i in "1234"]
    assert [part.nbytes for part in parts] == [11, 4, 20, 11]


def test_one_file_has_no_number_and_no_index(tmp_path: Path) -> None:
    checkpoint = memory({"a": np.ones(3, np.float32)}, config={})
    write_hf(checkpoint, tmp_path, max_shard_bytes=100, progress=ignore)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_index_and_metadata(tmp_path: Path) -> None:
    """F21: the total is what was written, and every file says format pt."""
    values = {f"x{i}": np.full((i, 3), i, np.float32) for i in range(1, 8)}
    values["half"] = np.ones(5, BF16)
    files = write_hf(memory(values), tmp_path, max_shard_bytes=100, progress=ignore)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in values.values())}
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) > 2
    for file in files:
        with safe_open(tmp_path / file.name, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {n for n, f in index["weight_map"].items() if f == file.name} == set(
                opened.keys()
            )
    assert_same_bits(read_hf(tmp_path), values)


def test_what_is_known_of_a_written_file(tmp_path: Path) -> None:
    [part] = shard(lazy({"a": np.arange(9, dtype=np.float32), "b": np.ones((2, 3), BF16)}), 100)
    done: list[int] = []
    written = write_shard(tmp_path, part, done.append)
    data = (tmp_path / part.name).read_bytes()
    assert written.nbytes == len(data)
    assert written.sha256 == hashlib.sha256(data).hexdigest()
    assert sum(done) == part.nbytes + len(data)


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    [part] = shard(lazy({"a": np.ones(3, np.float32)}), 100)
    (tmp_path / part.name).write_text("mine")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path, part, ignore)
    assert (tmp_path / part.name).read_text() == "mine"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("position", [-1, -12, -13, -36])
def test_a_flipped_bit_is_found_and_the_file_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """On its way to the disk, in the tensor that is ``position`` bytes from the end."""
    [part] = shard(lazy({"a": np.ones(6, np.float32), "b": np.arange(12, dtype=np.uint8)}), 100)
    total = write_shard(tmp_path, part, ignore).nbytes
    (tmp_path / part.name).unlink()

    def broken_disk(descriptor: int, data: memoryview, offset: int) -> None:
        data[total + position - offset] ^= 1
        write(descriptor, data, offset)
        data[total + position - offset] ^= 1

    write = checked_file.write_at
    monkeypatch.setattr(checked_file, "write_at", broken_disk)
    name = "b" if position >= -12 else "a"
    with pytest.raises(OutputError, match=f"{name}: the values read back differ from those"):
        write_shard(tmp_path, part, ignore)
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_lost_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [part] = shard(lazy({"a": np.ones(6, np.float32)}), 100)
    write = checked_file.write_at
    monkeypatch.setattr(checked_file, "write_at", lambda file, data, at: write(file, data[:0], at))
    with pytest.raises(OutputError, match="the values read back differ from those"):
        write_shard(tmp_path, part, ignore)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"b": np.ones(6, np.float32)}, "read back with other tensors than were written"),
        ({"a": np.ones((2, 3), np.float32)}, r"a: read back as F32 \[2, 3\]"),
        ({"a": np.ones(6, np.int32)}, r"a: read back as I32 \[6\]"),
    ],
)
def test_a_header_that_says_something_else_is_found(
    tmp_path: Path, other: dict[str, Array], message: str
) -> None:
    [part] = shard(lazy(other), 100)
    write_shard(tmp_path, part, ignore)
    with pytest.raises(OutputError, match=message):
        check_shard(tmp_path / part.name, lazy({"a": np.ones(6, np.float32)}))


@pytest.mark.parametrize("shape", [(), (7,), (3000,), (3, 5), (2, 3, 2000)])
def test_a_tensor_that_lies_elsewhere_is_found(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """As where the header were a few bytes off: names, shapes and dtypes agree, places do not."""
    size = int(np.prod(shape))
    values = {"a": np.arange(size).reshape(shape), "b": np.arange(size, 2 * size).reshape(shape)}
    [part] = shard(lazy(values), 10**6)
    path = tmp_path / part.name
    write_shard(tmp_path, part, ignore)
    check_shard(path, part.tensors)
    swapped = {"b": part.tensors["b"], "a": part.tensors["a"]}
    with pytest.raises(OutputError, match="b: read back from another place"):
        check_shard(path, swapped)


def test_a_broken_header_is_found(tmp_path: Path) -> None:
    [part] = shard(lazy({"a": np.ones(6, np.float32)}), 100)
    write_shard(tmp_path, part, ignore)
    flip(tmp_path / part.name, 1)
    with pytest.raises(OutputError, match=r"cannot be read back: .*the disk or its file system"):
        check_shard(tmp_path / part.name, part.tensors)


def test_side_files_travel_and_config_says_the_dtype_of_most_weights(tmp_path: Path) -> None:
    template = tmp_path / "named.jinja"
    template.write_text("{{ bos_token }}")
    (tmp_path / "out").mkdir()
    values = {"a": np.ones((5, 5), BF16), "b": np.ones(9, np.float32), "c": np.ones(99, np.int8)}
    checkpoint = memory(
        values, config={"ü": 1}, files={"additional_chat_templates/named.jinja": template}
    )
    write_hf(checkpoint, tmp_path / "out", max_shard_bytes=10**6, progress=ignore)
    copied = tmp_path / "out" / "additional_chat_templates" / "named.jinja"
    assert copied.read_text() == "{{ bos_token }}"
    config = (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    assert json.loads(config) == {"ü": 1, "dtype": "bfloat16"}
