"""Faults that fuzzing found, each by its smallest input."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.console import print_json
from gemma_convert.convert.bucket.objects import ObjectInfo, parse_bucket_path
from gemma_convert.convert.bucket.read import _open_orbax
from gemma_convert.convert.errors import AdapterError, GemmaConvertError, InputError
from gemma_convert.convert.hub.front_matter import read_front_matter
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.readers.jsonfile import DEPTH_LIMIT, parse_object, read_bytes
from gemma_convert.surgery.adapters.open import adapter_source, opened
from gemma_convert.surgery.adapters.pattern_rules import RULES, PatternRule
from gemma_convert.surgery.adapters.patterns import check_pattern, matches
from gemma_convert.surgery.trained_on import stored_scheme
from tests import peft_files
from tests.checkpoints import GEMMA3, base_arrays, run_cli, write_base, write_run
from tests.fuzz.guard import bounded_time, check_message
from tests.fuzz.targets import SAMPLES, look_and_plan

EXPERTS = "base_model.model.model.layers.1.experts.lora_"


def header(path: Path, table: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def base(directory: Path, **config: Any) -> Path:
    return write_base(directory, {**GEMMA3, **config}, base_arrays(GEMMA3, "model."))


# Messages


def test_an_error_is_one_line_of_printable_characters() -> None:
    error = InputError("a\nb\x1b[31m\x9b\u202e\ud800\0", "do\r\nthis")
    assert str(error) == r"a\nb\x1b[31m\x9b\u202e\ud800\x00; do\r\nthis"
    assert (error.what, error.remedy) == (r"a\nb\x1b[31m\x9b\u202e\ud800\x00", r"do\r\nthis")
    assert str(type(error)(error.what, error.remedy)) == str(error)


def test_an_error_is_not_long() -> None:
    text = str(InputError("begin" + "y" * 10**6 + "end", "remedy"))
    assert len(text) < 3000
    assert text.startswith("beginyyy")
    assert text.endswith("yyend; remedy")


def test_a_key_with_an_escape_sequence(tmp_path: Path, capsys: Any) -> None:
    directory = peft_files.write(tmp_path / "a", {}, **{"x\n\x1b[31m": 1})
    write_base(tmp_path / "b", GEMMA3, base_arrays(GEMMA3, "model."))
    assert run_cli("inspect", directory) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_json_for_machines_cannot_act_on_a_terminal(capsys: Any) -> None:
    value = {"name": "a\x9b31m\u202e\udc80\x7fé"}
    print_json(value)
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert set(out) & set("\x9b\u202e\udc80\x7f") == set()
    assert "é" in out


# JSON


@pytest.mark.parametrize("depth", [DEPTH_LIMIT, DEPTH_LIMIT + 1, 900, 960, 980, 100_000])
def test_json_nested_deep(depth: int) -> None:
    data = b'{"x":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    if depth == DEPTH_LIMIT:
        assert list(parse_object(data, "f")) == ["x"]
    else:
        with pytest.raises(InputError, match=r"^f is (nested more than 100 deep|not valid JSON)"):
            parse_object(data, "f")


def test_half_a_character() -> None:
    with pytest.raises(InputError, match=r"^f holds half a surrogate pair, no character; download"):
        parse_object(rb'{"a": ["\ud800"]}', "f")
    assert parse_object(rb'{"a": "\ud83d\ude00"}', "f") == {"a": "\U0001f600"}


@pytest.mark.parametrize("key", ["query_pre_attn_scalar", "rope_theta", "hidden_size"])
def test_a_number_beyond_floats(tmp_path: Path, key: str) -> None:
    directory = base(tmp_path / "m", **{key: 10**400})
    with pytest.raises(InputError, match=r"config\.json is not valid JSON: a number of 401 digits"):
        open_checkpoint(directory)


def test_the_largest_number_that_configs_hold() -> None:
    """What transformers writes as the length of a model that has none."""
    assert parse_object(b'{"n": %d}' % int(1e30), "f") == {"n": int(1e30)}


# Safetensors


@pytest.mark.parametrize("dtype", ["F64", "I8"])
def test_an_empty_tensor_too_large_to_address(tmp_path: Path, dtype: str) -> None:
    table = {"w": {"dtype": dtype, "shape": [0, 2**62], "data_offsets": [0, 0]}}
    path = header(tmp_path / "x.safetensors", table)
    if dtype == "I8":
        assert open_checkpoint(path)["w"].numpy().shape == (0, 2**62)
    else:
        with pytest.raises(InputError, match=r"'w' has a shape beyond what can be addressed: \[0,"):
            open_checkpoint(path)


def test_offsets_of_thousands_of_digits(tmp_path: Path) -> None:
    """Python prints no number of more than 4300 digits, not even in an error."""
    big = "9" * 299
    text = f'{{"w": {{"dtype": "I8", "shape": [0], "data_offsets": [{big}, {big}]}}}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(InputError, match=r"'w' has data_offsets that are not \[begin, end\]: "):
        open_checkpoint(path)


@pytest.mark.parametrize("shard", ["y" * 300 + ".safetensors", "y/" * 3000 + "x.safetensors"])
def test_a_shard_with_a_name_too_long(tmp_path: Path, shard: str) -> None:
    text = json.dumps({"weight_map": {"w": shard}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"names the shard y.*, which is not there") as raised:
        open_checkpoint(tmp_path)
    check_message(raised.value)


def test_a_shard_with_a_newline_in_its_name(tmp_path: Path) -> None:
    name = "a\nb.safetensors"
    header(tmp_path / name, {})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(InputError, match=r"'w' in 'a\\nb.safetensors', which holds control char"):
        open_checkpoint(tmp_path)


# Adapters


def test_no_rank_in_experts(tmp_path: Path) -> None:
    factors = {"A": np.ones((0, 5), np.float32), "B": np.ones((7, 0), np.float32)}
    directory = peft_files.write(
        tmp_path / "a",
        {f"{EXPERTS}{side}.weight": array for side, array in factors.items()},
        target_parameters=["experts.down_proj"],
        peft_version="0.19.1",
    )
    with pytest.raises(AdapterError, match=r"experts.*: the factors have rank 0, adapter_conf"):
        opened(adapter_source(open_checkpoint(directory)))


@pytest.mark.parametrize("rule", [RULES[0], RULES[-1]])
def test_a_pattern_that_takes_years(rule: PatternRule) -> None:
    pattern = r"(a|aa)+(b|bb)+(a|aa)+\b\d"
    check_pattern(pattern, "f")
    with (
        bounded_time(),
        pytest.raises(AdapterError, match=r"^f: adapter_config.json: the pattern .* takes too"),
    ):
        matches([pattern], rule, "." + "a" * 300, "f")


@pytest.mark.parametrize(
    "pattern", ["(?:(?:a{1000}){1000}){1000}", "a" * 1001, "(?:a{2000})", "a{999,1001}"]
)
def test_a_pattern_too_long_to_be_meant(pattern: str) -> None:
    with pytest.raises(AdapterError, match=r"^f has .*, a pattern too long to be meant; download"):
        check_pattern(pattern, "f")


@pytest.mark.parametrize("pattern", ["(", "*", "(" * 499 + ")" * 499, "a{3,2}"])
def test_a_pattern_that_is_none(pattern: str) -> None:
    with pytest.raises(AdapterError, match=r"^f is .*, expected regular expressions; download"):
        check_pattern(pattern, "f")


@pytest.mark.parametrize("pattern", [r"layers\.\d{1,2}\.self_attn\.q_proj", "[[a]", r"mlp\..*"])
def test_a_pattern_as_peft_takes_it(pattern: str) -> None:
    """One that Python's re warns of is matched without a word."""
    check_pattern(pattern, "f")
    modules = ("model.layers.12.self_attn.q_proj", "x.[", "x.mlp.up_proj")
    assert [pattern] in (found := [matches([pattern], RULES[-1], m, "f") for m in modules])
    assert found.count([]) == 2


@pytest.mark.parametrize("rules", [7, True, 0.5, "nf4", {"weight_qtype": "int8"}])
def test_rules_that_are_no_list(rules: Any) -> None:
    lora = {"weight_qtype": "nf4", "tile_size": 32, "rules": rules}
    if isinstance(rules, dict):
        with pytest.raises(AdapterError, match=r"training quantised to int8, no tiles and nf4, ti"):
            stored_scheme({"custom_metadata": {"lora": lora}})
    else:
        assert str(stored_scheme({"custom_metadata": {"lora": lora}})) == "nf4, tile 32"


@pytest.mark.parametrize("tile", [float("inf"), float("nan"), -1, 2**40])
def test_a_tile_that_is_no_size(tile: float) -> None:
    lora = {"weight_qtype": "nf4", "tile_size": tile}
    with pytest.raises(AdapterError, match=r"says weight_qtype 'nf4', tile_size .*not understood"):
        stored_scheme({"custom_metadata": {"lora": lora}})


# Orbax


def zarray(directory: Path, **changes: Any) -> Path:
    """The sample without OCDBT, the ``.zarray`` of one array changed."""
    tree = directory / "tree"
    shutil.copytree(SAMPLES / "pytree_no_ocdbt", tree)
    path = sorted(tree.rglob(".zarray"))[0]
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tree


@pytest.mark.parametrize("size", [100_000, 2**32, 2**38])
def test_a_chunk_that_no_memory_holds(tmp_path: Path, size: int) -> None:
    """The process would end: tensorstore aborts when it cannot allocate one."""
    tree = zarray(tmp_path, chunks=[size, 1024, 1024], shape=[3, 5, 7], dtype="<f4")
    with pytest.raises(InputError, match=rf" has chunks of {size << 22} bytes each; copy the"):
        open_checkpoint(tree)


def test_a_chunk_as_large_as_an_array_that_no_memory_holds(tmp_path: Path) -> None:
    tree = zarray(tmp_path, chunks=[2**50], shape=[2**50], dtype="<f4")
    with pytest.raises(InputError, match=rf"shape .{2**50},. has chunks of {2**52} bytes each"):
        open_checkpoint(tree)


def test_an_array_of_no_numbers(tmp_path: Path) -> None:
    tree = zarray(tmp_path, dtype="|V4", fill_value=None)
    with pytest.raises(InputError, match=r"tensor 'transformer.*' in .*tree "):
        open_checkpoint(tree)


# What is no file


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


SPECIAL = (pipe, unix_socket, device, folder)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_or_device_in_a_model(
    tmp_path: Path, name: str, kind: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    directory = base(Path("m"))
    (directory / name).unlink()
    kind(directory / name)
    with (
        bounded_time(),
        pytest.raises(InputError, match=rf"m/{name} is no regular file but a"),
    ):
        open_checkpoint(directory)


@pytest.mark.parametrize("kind", [pipe, unix_socket, device])
def test_a_pipe_or_device_as_the_input(
    kind: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind(Path("x.safetensors"))
    with bounded_time(), pytest.raises(InputError, match=r"is no regular file but a pipe, device"):
        open_checkpoint("x.safetensors")


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d", "_sharding", "more"])
def test_a_pipe_in_an_orbax_tree(tmp_path: Path, name: str) -> None:
    tree = tmp_path / "t"
    shutil.copytree(SAMPLES / "standard_flat", tree)
    if (tree / name).is_dir():
        name = f"d/{sorted((tree / name).iterdir())[0].name}"
    (tree / name).unlink(missing_ok=True)
    pipe(tree / name)
    with bounded_time(), pytest.raises(InputError, match=rf"{name} is no regular file but a pipe"):
        open_checkpoint(tree)


def test_pipes_and_devices_are_no_side_files(tmp_path: Path) -> None:
    directory = base(tmp_path / "m")
    (directory / "tokenizer.json").write_text("{}")
    pipe(directory / "chat_template.jinja")
    device(directory / "merges.txt")
    with bounded_time():
        assert list(open_checkpoint(directory).files) == ["tokenizer.json"]


def test_a_file_that_says_it_is_empty_and_never_ends(tmp_path: Path, monkeypatch: Any) -> None:
    """Files of /proc have the size 0."""

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return len(buffer)

        def fileno(self) -> int:
            return held.fileno()

    (tmp_path / "x").write_bytes(b"")
    with (tmp_path / "x").open("rb") as held:
        monkeypatch.setattr(
            "gemma_convert.convert.readers.jsonfile.open_regular", lambda path: Endless()
        )
        monkeypatch.setattr("gemma_convert.convert.readers.jsonfile.JSON_LIMIT", 1000)
        with bounded_time(), pytest.raises(InputError, match=r"x has 0 bytes, more than 1000"):
            read_bytes(tmp_path / "x")


# All together


@pytest.mark.parametrize("value", [{"merged": [{"factors_sha256": "x"}]}, {"merged": {}}, []])
def test_a_ledger_of_someone_else(tmp_path: Path, value: Any) -> None:
    directory = base(tmp_path / "m")
    (directory / "conversion.json").write_text(json.dumps(value))
    look_and_plan(open_checkpoint(directory))


def test_a_rank_of_zero_in_orbax(tmp_path: Path) -> None:
    names = {"layers.0.attn.q_einsum.w_lora_a": (10, 2), "layers.0.attn.q_einsum.w_lora_b": (2, 6)}
    run = write_run(tmp_path / "r", {n: np.ones(s, np.float32) for n, s in names.items()})
    checkpoint = open_checkpoint(run)
    for tensor, shape in zip(checkpoint.values(), ((10, 0), (0, 6)), strict=True):
        tensor.shape = shape
    with pytest.raises(GemmaConvertError, match=r"w: the factors have rank 0; the checkpoint is"):
        adapter_source(checkpoint)


# Buckets


@pytest.mark.parametrize("name", ["../../x/_METADATA", "/etc/_METADATA", "a//_METADATA", "a\0b"])
def test_an_object_whose_name_leaves_the_copy(name: str, tmp_path: Path) -> None:
    """Heads of a checkpoint in a bucket are copied to files called like its objects."""
    path = parse_bucket_path("gs://bucket/run")
    found = {name: ObjectInfo(2, "", "1", 0)}

    class Bucket:
        def read(self, *_: Any) -> bytes:
            raise AssertionError("nothing is read")

    with pytest.raises(InputError, match=r"gs://bucket/run holds an object called .*, which is no"):
        _open_orbax(Bucket(), path, found, None)  # type: ignore[arg-type]


# Model cards


@pytest.mark.parametrize(
    "text",
    [
        *("a: 2001-99-99", "a: !!int ''", "a: !!bool x", "a: !!timestamp x", "a: !!float ''"),
        *("a: " + "[" * 5000, "a: " + "9" * 5000, "a: [\x1b", "!!python/object:os.system {}"),
    ],
    ids=range(9),
)
def test_metadata_that_yaml_stumbles_over(text: str) -> None:
    with pytest.raises(InputError, match=r"^card: its metadata is not valid YAML: ") as raised:
        read_front_matter(f"---\n{text}\n---\n", "card")
    check_message(raised.value)


ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


def test_metadata_of_aliases_within_aliases() -> None:
    with pytest.raises(InputError, match=r"^card: its metadata uses the alias \*a0; write its "):
        read_front_matter(f"---\n{ALIASES}license: *a9\n---\n", "card")


@pytest.mark.parametrize("number", ["9" + ":59" * 100_000, "1" + ":1" * 3000 + ".5", "0xf" * 101])
def test_metadata_with_a_number_beyond_all(number: str) -> None:
    """PyYAML counts to the base of 60, in the square of the time."""
    told = f"card: its metadata is not valid YAML: a number of {len(number)} digits; mend it"
    with bounded_time(), pytest.raises(InputError) as raised:
        read_front_matter(f"---\nlicense: {number}\n---\n", "card")
    assert str(raised.value) == told


def test_metadata_without_end() -> None:
    text = "---\n" + "a: b\n" * 200_001 + "---\n"
    with bounded_time(), pytest.raises(InputError, match=r"^card: its metadata has 1000005 char"):
        read_front_matter(text, "card")
