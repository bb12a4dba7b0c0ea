"""Directories of safetensors: index, shards and side files, and indexes that must be refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_checkpoint, open_safetensors
from tests.safetensors_files import TWO, model, random_tensors


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


def test_an_old_adapter_is_not_unpickled_either(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(InputError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds no safetensors, only adapter_model.bin; nothing is unpickled here; "
        "convert to safetensors with PEFT: PeftModel.from_pretrained(BASE, DIR), then "
        "save_pretrained(OUT)"
    )


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for opened in (open_safetensors, open_checkpoint):
        with pytest.raises(
            InputError, match=r"only pytorch_model-00001-of-00002\.bin; nothing is unpickled here"
        ):
            opened(tmp_path)
