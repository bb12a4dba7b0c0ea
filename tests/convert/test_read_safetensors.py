"""The safetensors reader: what it reads, and every input that it must refuse."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from gemma_convert.convert import dtypes
from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_checkpoint, open_safetensors, read_file
from gemma_convert.convert.readers.names import in_natural_order
from gemma_convert.convert.readers.safetensors_tensor import runs
from gemma_convert.convert.tensor import Box, blocks, slices

# Two tensors as the format's specification lays them out: I16 [1, 2] then F32 [] = 1.5.
GOLDEN = (
    b"\x6a\x00\x00\x00\x00\x00\x00\x00"
    b'{"b":{"dtype":"I16","shape":[2],"data_offsets":[0,4]},'
    b'"a":{"dtype":"F32","shape":[],"data_offsets":[4,8]}}'
    b"\x01\x00\x02\x00"
    b"\x00\x00\xc0\x3f"
)

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12\n"


def entry(dtype: Any = "U8", shape: Any = (2,), offsets: Any = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def random_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "model.layers.10.w": rng.normal(size=(5, 3)).astype(ml_dtypes.bfloat16),
        "model.layers.2.w": rng.normal(size=(7, 2, 3)).astype(np.float32),
        "scale": rng.normal(size=(11,)).astype(np.float16),
        "codes": rng.integers(-128, 127, (3, 5), np.int8),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(rng.normal(), np.float64),
    }


def model(directory: Path, shards: dict[str, list[str]], **index: Any) -> Path:
    """A directory of shards, each name a tensor of two bytes, with an index that fits."""
    directory.mkdir(exist_ok=True)
    weight_map = {}
    for shard, names in shards.items():
        save_file({name: np.array([len(name), 7], np.uint8) for name in names}, directory / shard)
        weight_map |= dict.fromkeys(names, shard)
    text = json.dumps({"metadata": {}, "weight_map": weight_map, **index})
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


TWO = {"a.safetensors": ["x.2", "x.10"], "b.safetensors": ["y"]}


# Reading


def test_golden_bytes(tmp_path: Path) -> None:
    path = tmp_path / "golden.safetensors"
    path.write_bytes(GOLDEN)
    checkpoint = open_safetensors(path)
    assert list(checkpoint) == ["a", "b"]
    assert checkpoint["b"].numpy().tolist() == [1, 2]
    assert checkpoint["a"].numpy().shape == ()
    assert checkpoint["a"].numpy() == np.float32(1.5)
    assert (checkpoint["b"].path, checkpoint["b"].offset) == (path, 114)  # type: ignore[attr-defined]
    assert checkpoint["a"].offset == 118  # type: ignore[attr-defined]


def test_equals_the_library_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(random_tensors(), path, {"format": "pt"})
    checkpoint = read_file(path)
    assert checkpoint.metadata["safetensors"] == {"format": "pt"}
    with safe_open(path, "numpy") as library:
        assert set(library.keys()) == set(checkpoint)
        for name, tensor in checkpoint.items():
            expected = library.get_tensor(name)
            assert tensor.dtype == expected.dtype
            assert tensor.shape == expected.shape
            assert tensor.numpy().tobytes() == expected.tobytes()
            assert tensor.numpy().flags.c_contiguous
            assert path.read_bytes()[tensor.offset :].startswith(expected.tobytes())  # type: ignore[attr-defined]


def test_blocks_join_to_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    array = np.random.default_rng(1).normal(size=(6, 5, 7)).astype(np.float32)
    save_file({"x": array}, path)
    tensor = read_file(path)["x"]
    parts = [tensor.read(box).tobytes() for box in blocks(tensor, 4 * 7 * 2)]
    assert len(parts) == 6 * 3
    assert b"".join(parts) == array.tobytes()


@st.composite
def shaped_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append((start, draw(st.integers(start, size))))
    return shape, tuple(box)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("boxes")


@given(shaped_boxes())
def test_any_box_equals_the_slice(scratch: Path, case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    save_file({"before": np.ones(3, np.uint8), "x": array}, scratch / "x.safetensors")
    found = read_file(scratch / "x.safetensors")["x"].read(box)
    np.testing.assert_array_equal(found, array[slices(box)], strict=True)
    assert found.flags.c_contiguous


def test_runs_are_as_long_as_can_be() -> None:
    def of(*box: tuple[int, int]) -> tuple[int, list[int]]:
        length, starts = runs(box, (4, 3, 5), 2)
        return length, list(starts)

    assert of((0, 4), (0, 3), (0, 5)) == (120, [0])
    assert of((1, 3), (0, 3), (0, 5)) == (60, [30])
    assert of((1, 2), (1, 3), (0, 5)) == (20, [40])
    assert of((1, 3), (1, 2), (0, 5)) == (10, [40, 70])
    assert of((0, 1), (1, 3), (2, 4)) == (4, [14, 24])


def test_box_outside_the_shape_is_refused(tmp_path: Path) -> None:
    save_file({"x": np.zeros((2, 3), np.uint8), "y": np.ones(9, np.uint8)}, tmp_path / "x")
    tensor = read_file(tmp_path / "x")["x"]
    for box in (((0, 3), (0, 3)), ((-1, 1), (0, 3)), ((0, 2),), ((2, 1), (0, 3))):
        with pytest.raises(ValueError, match="is not inside shape"):
            tensor.read(box)


def test_threads_share_a_tensor(tmp_path: Path) -> None:
    array = np.random.default_rng(2).integers(0, 255, (64, 1000), np.uint8)
    save_file({"x": array}, tmp_path / "x.safetensors")
    tensor = read_file(tmp_path / "x.safetensors")["x"]
    start = threading.Barrier(8)

    def work(worker: int) -> bool:
        start.wait()
        return all(
            (tensor.read(((row, row + 1), (worker, 900))) == array[row, worker:900]).all()
            for row in range(64)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", {f"{i}.safetensors": [f"t{i}"] for i in range(20)})
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_safetensors(directory)
    for tensor in checkpoint.values():
        tensor.numpy()
    assert len(os.listdir("/proc/self/fd")) == before


def test_natural_order() -> None:
    names = ["l.10.w", "l.2.w", "l.2.b", "a", "l.02.b", "l", "10", "9", f"l.{'9' * 5000}.w"]
    expected = ["9", "10", "a", "l", "l.02.b", "l.2.b", "l.2.w", "l.10.w", f"l.{'9' * 5000}.w"]
    assert list(in_natural_order(dict.fromkeys(names))) == expected


# Directories


def test_directory_with_index(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO)
    (directory / "config.json").write_text('{"model_type": "gemma3_text"}')
    checkpoint = open_safetensors(directory)
    assert list(checkpoint) == ["x.2", "x.10", "y"]
    assert checkpoint["x.10"].numpy().tolist() == [4, 7]
    assert checkpoint.config == {"model_type": "gemma3_text"}
    assert (checkpoint.source, checkpoint.format) == (str(directory), "safetensors")
    assert checkpoint.notes == ()


def test_index_is_an_allowlist(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO)
    save_file({"y": np.zeros(3, np.uint8)}, directory / "old.safetensors")
    save_file({"z": np.zeros(3, np.uint8)}, directory / "model.safetensors")
    checkpoint = open_safetensors(directory)
    assert list(checkpoint) == ["x.2", "x.10", "y"]
    assert checkpoint["y"].shape == (2,)
    assert checkpoint.notes == (
        "ignored model.safetensors (transformers would load it instead): "
        "model.safetensors.index.json does not name it",
        "ignored old.safetensors: model.safetensors.index.json does not name it",
    )


def test_without_index_all_files_count(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO)
    (directory / "model.safetensors.index.json").unlink()
    assert list(open_safetensors(directory)) == ["x.2", "x.10", "y"]


def test_one_file_alone_and_what_it_leaves(tmp_path: Path) -> None:
    save_file(random_tensors(), tmp_path / "model.safetensors")
    assert open_safetensors(tmp_path / "model.safetensors").notes == ()
    (tmp_path / "config.json").write_text("{}")
    assert open_safetensors(tmp_path / "model.safetensors").notes == (
        f"opened one file; give {tmp_path} to use the config.json there",
    )


def test_side_files(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO)
    keep = ["tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json"]
    leave = [
        *("config.json", "README.md", ".gitattributes", ".hidden", "old.safetensors", "x.bin"),
        *("pytorch_model.bin.index.json", "optimizer.pt", "x.pth", "x.gguf", "tf_model.h5"),
        *("flax_model.msgpack", "model.onnx", "adapter_config.json"),
    ]
    for name in keep + leave:
        (directory / name).write_text("{}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("x")
    (directory / "other").mkdir()
    (directory / "special_tokens_map.json").symlink_to("tokenizer.json")
    files = open_safetensors(directory).files
    extra = ["additional_chat_templates/rag.jinja", "special_tokens_map.json"]
    assert list(files) == sorted(keep + extra)
    assert all(path == directory / name for name, path in files.items())


def test_shards_may_be_symlinks_as_in_the_hub_cache(tmp_path: Path) -> None:
    blobs = model(tmp_path / "blobs", TWO)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert open_safetensors(snapshot)["y"].numpy().tolist() == [1, 7]


def test_adapter_directory(tmp_path: Path) -> None:
    save_file({"base_model.q.lora_A.weight": np.ones((2, 3), np.float32)}, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"no adapter_config\.json; without it the scale"):
        open_safetensors(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.metadata["adapter_config"] == {"r": 2, "lora_alpha": 4}
    assert list(checkpoint) == ["base_model.q.lora_A.weight"]
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"adapter_model\.safetensors, and a model, model\.safe"):
        open_safetensors(tmp_path)


def test_fingerprint_tells_a_change(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO)
    first = open_safetensors(directory).fingerprint
    assert list(first) == ["a.safetensors", "b.safetensors"]
    assert open_safetensors(directory).fingerprint == first
    save_file({"y": np.array([1, 7], np.int8)}, directory / "b.safetensors")
    second = open_safetensors(directory).fingerprint
    assert second["a.safetensors"] == first["a.safetensors"]
    assert second["b.safetensors"].split()[0] != first["b.safetensors"].split()[0]


# Hostile headers


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


# Files that change while they are read


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


# Hostile indexes and directories


def index_of(directory: Path, text: str) -> Path:
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"index\.json is not valid JSON"),
        ("[]", r"index\.json must be a JSON object, found list"),
        ('{"metadata": {}}', r"index\.json has no weight_map"),
        ('{"weight_map": {}}', r"index\.json has no weight_map"),
        ('{"weight_map": {"y": "b.safetensors", "y": "a.safetensors"}}', "the key 'y' twice"),
    ],
)
def test_hostile_index(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_safetensors(index_of(model(tmp_path / "m", TWO), text))


@pytest.mark.parametrize(
    "shard",
    [
        *("../b.safetensors", "../../x", "/etc/passwd", "a/../../b.safetensors", "..", ""),
        *("..\\b.safetensors", "C:b.safetensors", "a\0.safetensors", 7, None),
    ],
)
def test_index_entry_that_leaves_the_directory(tmp_path: Path, shard: Any) -> None:
    directory = model(tmp_path / "m", TWO, weight_map={"y": shard})
    shutil.copy(directory / "b.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(InputError, match=r"puts tensor 'y' in .*, which leaves the directory"):
        open_safetensors(directory)


def test_index_that_names_pickles(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO, weight_map={"y": "b.bin"})
    with pytest.raises(InputError, match=r"'b\.bin', which is no safetensors file; nothing is un"):
        open_safetensors(directory)


def test_missing_shard(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO)
    (directory / "b.safetensors").unlink()
    with pytest.raises(
        InputError, match=r"index\.json names the shard b\.safetensors, which is not there; down"
    ):
        open_safetensors(directory)


def test_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    wrong = {"x.2": "a.safetensors", "x.10": "b.safetensors", "y": "b.safetensors"}
    directory = model(tmp_path / "m", TWO, weight_map=wrong)
    with pytest.raises(
        InputError,
        match=r"'x\.10' in b\.safetensors, which does not hold it, but a\.safetensors holds it",
    ):
        open_safetensors(directory)


def test_tensor_in_no_shard(tmp_path: Path) -> None:
    more = {"x.2": "a.safetensors", "x.10": "a.safetensors", "y": "b.safetensors"}
    directory = model(tmp_path / "m", TWO, weight_map=more | {"z": "b.safetensors"})
    with pytest.raises(InputError, match=r"'z' in b\.safetensors, which does not hold it; keep"):
        open_safetensors(directory)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO | {"c.safetensors": ["z", "x.2"]})
    message = r"a\.safetensors and c\.safetensors both hold tensor 'x\.2'"
    with pytest.raises(InputError, match=message):
        open_safetensors(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match=message):
        open_safetensors(directory)


def test_tensor_not_in_the_index(tmp_path: Path) -> None:
    less = {"x.2": "a.safetensors", "y": "b.safetensors"}
    directory = model(tmp_path / "m", TWO, weight_map=less)
    with pytest.raises(InputError, match=r"a\.safetensors holds tensor 'x\.10', which .* lacks"):
        open_safetensors(directory)


def test_several_indexes(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TWO)
    index = directory / "model.safetensors.index.json"
    shutil.copy(index, directory / "p.safetensors.index.json")
    assert len(open_safetensors(directory)) == 3
    index.rename(directory / "q.safetensors.index.json")
    with pytest.raises(InputError, match=r"several indexes: p\.safetensors.*, q\.safetensors"):
        open_safetensors(directory)


def test_numbered_shards_must_be_complete_without_an_index(tmp_path: Path) -> None:
    shards = {f"model-0000{i}-of-00003.safetensors": [f"t{i}"] for i in (1, 2, 3)}
    directory = model(tmp_path / "m", shards)
    (directory / "model.safetensors.index.json").unlink()
    assert len(open_safetensors(directory)) == 3
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"lacks model-00002-of-00003\.safetensors; download"):
        open_safetensors(directory)
    save_file({"u": np.ones(1)}, directory / "model-00001-of-00002.safetensors")
    with pytest.raises(InputError, match="shards of several saves: of 2 and of 3"):
        open_safetensors(directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not valid JSON"), ("7", "must be a JSON object"), ('{"a":1,"a":2}', "'a' twice")],
)
def test_hostile_config(tmp_path: Path, text: str, message: str) -> None:
    directory = model(tmp_path / "m", TWO)
    (directory / "config.json").write_text(text)
    with pytest.raises(InputError, match=rf"config\.json .*{message}"):
        open_safetensors(directory)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for opened in (open_safetensors, open_checkpoint):
        with pytest.raises(
            InputError, match=r"only pytorch_model-00001-of-00002\.bin; nothing is unpickled here"
        ):
            opened(tmp_path)


# Dtypes


@pytest.mark.parametrize("row", dtypes.SPELLINGS, ids=lambda row: row.safetensors)
def test_dtypes_agree_with_the_library(tmp_path: Path, row: dtypes.Spelling) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    path = tmp_path / "x.safetensors"
    size = row.numpy.itemsize
    data = bytes(range(1, 1 + size)) if row.safetensors != "BOOL" else b"\1"
    raw(path, {"a": entry(row.safetensors, [1], [0, size])}, data)
    assert load_file(path)["a"].dtype == getattr(torch, row.config)
    assert read_file(path)["a"].numpy().tobytes() == data
    assert dtypes.to_safetensors(row.numpy) == row.safetensors
    assert dtypes.from_safetensors(row.safetensors) == row.numpy
    assert dtypes.from_config(f"torch.{row.config}") == dtypes.from_config(row.config) == row.numpy
    assert dtypes.to_config(row.numpy) == row.config


def test_unknown_dtypes() -> None:
    with pytest.raises(InputError, match="dtype int4 cannot be stored in safetensors; cast it"):
        dtypes.to_safetensors(np.dtype(ml_dtypes.int4))
    with pytest.raises(InputError, match="dtype complex128 cannot"):
        dtypes.to_config(np.dtype(np.complex128))
    with pytest.raises(InputError, match="unknown dtype 'float4'; known are bfloat16"):
        dtypes.from_config("float4")
