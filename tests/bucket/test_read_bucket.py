"""Reading from a bucket on loopback: the same tensors, ledger and refusals as from a disk."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from gemma_convert.convert.bucket import range_tensor
from gemma_convert.convert.bucket.objects import BucketPath, Objects, parse_bucket_path
from gemma_convert.convert.errors import GemmaConvertError, InputError
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.convert.tensor import blocks
from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    read_hf,
    run_cli,
    snapshot,
    tunix_arrays,
    write_base,
    write_run,
)
from tests.gcs_server import Bucket

SIDE = {"tokenizer.json": "{}", "additional_chat_templates/tool.jinja": "x", "empty.txt": ""}


@pytest.fixture
def base(bucket: Bucket, tmp_path: Path) -> tuple[str, Path]:
    """A model in the bucket, and the same on the disk."""
    weights = base_arrays(GEMMA3, "model.")
    folder = write_base(tmp_path / "base", GEMMA3, weights, shards=3, files=SIDE)
    return bucket.put_tree(folder, "models/base"), folder


@pytest.fixture
def run(bucket: Bucket, tmp_path: Path) -> str:
    """A full Orbax checkpoint in the bucket."""
    return bucket.put_tree(write_run(tmp_path / "full", tunix_arrays(GEMMA3)), "runs/sft")


def test_a_base(base: tuple[str, Path]) -> None:
    url, folder = base
    opened, local = open_base(Path(url)), open_base(folder)
    assert opened.source == url
    assert opened.config == local.config
    assert list(opened) == list(local)
    assert {n: p.read_bytes() for n, p in opened.files.items()} == {
        n: p.read_bytes() for n, p in local.files.items()
    }
    assert_same_bits(arrays(opened), read_hf(folder))
    assert set(opened.fingerprint) == set(local.fingerprint)


@pytest.mark.parametrize("limit", [range_tensor._RANGE_BYTES, 100])
def test_boxes(base: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Whole rows, columns and single elements; of tensors that are small and that are large."""
    monkeypatch.setattr(range_tensor, "_RANGE_BYTES", limit)
    opened = open_base(Path(base[0]))
    random = np.random.default_rng(3)
    for name, array in read_hf(base[1]).items():
        tensor = opened[name]
        box = tuple(tuple(sorted(random.integers(0, size + 1, 2))) for size in array.shape)
        column = (*((0, size) for size in array.shape[:-1]), (2, 5))
        for one in (box, column, next(blocks(tensor, 60))):
            index = tuple(slice(*side) for side in one)
            read = tensor.read(one)
            assert read.tobytes() == array[index].tobytes(), (name, one)
            assert read.flags.c_contiguous


@pytest.mark.parametrize("step", [None, 0])
def test_an_orbax_checkpoint(run: str, step: int | None) -> None:
    opened = open_checkpoint(run, step)
    assert_same_bits(arrays(opened), tunix_arrays(GEMMA3))
    assert opened.source == f"{run}/0/model_params"
    assert opened.metadata["steps"] == [0]
    assert_same_bits(arrays(open_checkpoint(f"{run}/0")), tunix_arrays(GEMMA3))


def test_an_array_that_is_gone_is_named(bucket: Bucket, run: str) -> None:
    opened = open_checkpoint(run)
    for name in bucket.names():
        if "/d/" in name:
            bucket.delete(name)
    with pytest.raises(InputError, match=rf"in {run}/0/model_params cannot be read"):
        arrays(opened)


def test_an_unfinished_save_is_refused(bucket: Bucket, run: str) -> None:
    """In a bucket a save is finished by a file, not by a name."""
    for name in bucket.names():
        if name.endswith("commit_success.txt"):
            bucket.delete(name)
    told = json.loads(bucket.files("runs/sft")["0/_CHECKPOINT_METADATA"])
    text = json.dumps({**told, "commit_timestamp_nsecs": None})
    bucket.put("runs/sft/0/_CHECKPOINT_METADATA", text.encode())
    with pytest.raises(InputError, match=rf"^{run} holds no finished step; unfinished: 0"):
        open_checkpoint(run)


def test_merged_as_from_a_disk(
    bucket: Bucket, base: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    remote = bucket.put_tree(local, "run")
    words = ["--alpha", ALPHA, "--quiet"]
    merge = ["orbax-to-hf", local, "--base", base[1], "--out", tmp_path / "one"]
    assert run_cli(*merge, *words) == 0
    merge = ["orbax-to-hf", remote, "--base", base[0], "--out", tmp_path / "two"]
    assert run_cli(*merge, *words) == 0
    one, two = snapshot(tmp_path / "one"), snapshot(tmp_path / "two")
    ledger = json.loads(two.pop("conversion.json") or b"")
    one.pop("conversion.json")
    assert two == one
    assert [entry["path"] for entry in ledger["inputs"]] == [f"{remote}/0/model_params", base[0]]
    assert capsys.readouterr().err == ""


def test_inspect(base: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for path in base:
        assert run_cli("inspect", path, "--json") == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0].pop("path") == base[0]
    shown[1].pop("path")
    assert shown[0] == shown[1]


def test_an_object_that_is_replaced_meanwhile(base: tuple[str, Path], tmp_path: Path) -> None:
    url = base[0]
    opened = open_base(Path(url))
    name = "model-00002-of-00003.safetensors"
    changed = tmp_path / name
    changed.write_bytes((base[1] / name).read_bytes())
    Objects().upload(changed, parse_bucket_path(url) / name)
    with pytest.raises(GemmaConvertError, match=f"{name} is not there, or was replaced meanwhile"):
        arrays(opened)


@pytest.mark.parametrize("damage", ["header", "missing", "index"])
def test_damage_is_told_of_the_bucket(bucket: Bucket, base: tuple[str, Path], damage: str) -> None:
    folder = base[1]
    shard = folder / "model-00002-of-00003.safetensors"
    if damage == "header":
        shard.write_bytes(b"\xff" * 8 + shard.read_bytes()[8:])
    elif damage == "missing":
        shard.unlink()
    else:
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')
    url = bucket.put_tree(folder, "damaged")
    with pytest.raises(InputError, match=f"{url}/model") as caught:
        open_base(Path(url))
    assert "gemma-convert-" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://b/a/../c", "is not a path in a bucket"),
        ("gs://no-such-bucket/x", "gs://no-such-bucket/x"),
    ],
)
def test_refusals(
    bucket: Bucket, url: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("inspect", url) == 1
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["Bucket", "my bucket", "-ab", "ab-", "ab", "a%2Fb", "a" * 223])
def test_names_that_no_bucket_has(name: str) -> None:
    message = f"gs://{name}/x': '{name}' cannot be the name of a bucket; it has 3 to 222 of a-z"
    with pytest.raises(InputError, match=re.escape(message)):
        parse_bucket_path(f"gs://{name}/x")


def test_an_empty_prefix(bucket: Bucket, base: object) -> None:
    with pytest.raises(InputError, match="/nothing holds no files; check the path"):
        open_checkpoint(bucket.url("nothing"))


def test_no_connection(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import gcsfs.retry

    async def at_once(seconds: float) -> None:
        pass

    monkeypatch.setattr(gcsfs.retry.asyncio, "sleep", at_once)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")  # nobody listens there
    assert run_cli("inspect", "gs://bucket/x") == 1
    err = capfd.readouterr().err
    assert err.startswith(
        "error: gs://bucket/x: the storage cannot be used (Cannot connect to host"
    )
    assert len(err.splitlines()) == 1


def test_without_gcsfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(InputError, match=r"the package gcsfs; pip install 'gemma-convert\[gcs"):
        open_checkpoint("gs://bucket/x")


@pytest.mark.parametrize("url", ["gs://b_1", "gs://b_1/", "gs://b_1/a", "gs://b_1/a/c/"])
def test_paths(url: str) -> None:
    path = parse_bucket_path(url)
    assert path == BucketPath("b_1", url.rstrip("/")[5:].partition("/")[2])
    assert str(path) == url.rstrip("/")


def test_what_lies_beside_an_orbax_checkpoint(bucket: Bucket, tmp_path: Path) -> None:
    """MaxText's adapter_config.json and our ledger, as on a disk."""
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    (run / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 6}')
    (run / "conversion.json").write_text('{"merged": [{"factors_sha256": "ab"}]}')
    local = open_checkpoint(run).metadata
    assert local["merged"] == [{"factors_sha256": "ab"}]
    assert local["beside"] == {"r": 2, "lora_alpha": 6}
    assert open_checkpoint(Path(bucket.put_tree(run, "runs/lora"))).metadata == local


def test_a_spooled_tensor_stays_open_while_others_take_its_place(tmp_path: Path) -> None:
    class Numbered:
        nbytes = 1

        def __init__(self, number: int) -> None:
            self.name = str(number)

        def fetch(self, start: int, stop: int) -> bytes:
            return self.name.encode()

    spool = range_tensor.Spool(tmp_path)
    files = [spool.open(Numbered(number)) for number in range(9)]  # type: ignore[arg-type]
    assert [file.read() for file in files] == [str(number).encode() for number in range(9)]
    assert len(list(tmp_path.iterdir())) == 4
    for file in files:
        file.close()
