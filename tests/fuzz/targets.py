"""What is fuzzed: a kind of input, the files of it that are damaged, and what is done with it.

`exercise` does with a directory what commands do before they write: open, inspect, plan; and reads
the data, which are small. What is accepted must be right: the bytes of tensors whose own file was
left alone are those of the sound input, and what an accepted safetensors file holds is what the
safetensors library reads from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from safetensors import safe_open

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import GemmaConvertError
from gemma_convert.convert.inspect import inspect, tensor_list
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, TUNIX
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapters.open import adapter_source, opened
from tests import peft_files
from tests.checkpoints import GEMMA3, GEMMA4, base_arrays, factor_arrays, write_base, write_run
from tests.fuzz.guard import bounded_time, check_message
from tests.fuzz.mutate import Mutation, damage_bytes, damage_header, damage_json

SAMPLES = Path(__file__).parent.parent / "data" / "orbax_samples"

READ_LIMIT = 1 << 20
"""Tensors above this many bytes are not read: no sound one here is as large."""


@dataclass(frozen=True)
class Target:
    """A kind of input.

    Attributes:
        count: How many inputs a run of the tests makes of it.
        build: Makes the sound input in a directory.
        files: Pattern of the files to damage to the ways to damage them.
        use: What is done with the input once it is open.
        keeps_values: Whether damage to those files must not change the values of a tensor.
    """

    count: int
    build: Callable[[Path], object]
    files: Mapping[str, tuple[Mutation, ...]]
    use: Callable[[Checkpoint], None]
    keeps_values: bool = True


def look(checkpoint: Checkpoint) -> None:
    """What `inspect` does."""
    inspect(checkpoint)
    tensor_list(checkpoint)


def look_and_plan(checkpoint: Checkpoint) -> None:
    """What `inspect` and a dry run of a conversion do."""
    look(checkpoint)
    convert(checkpoint, TUNIX if checkpoint.format == "safetensors" else HF)


def look_and_resolve(checkpoint: Checkpoint) -> None:
    """What is done with an adapter before it is placed in a base."""
    look(checkpoint)
    source = adapter_source(checkpoint)
    opened(source, 5.0 if source.takes_alpha else None)


def read_values(checkpoint: Checkpoint) -> dict[str, Array]:
    """The values of the tensors that are small."""
    small = {n: t for n, t in checkpoint.items() if t.nbytes <= READ_LIMIT}
    return {name: tensor.numpy() for name, tensor in small.items()}


def library_values(path: Path) -> dict[str, Array]:
    """What the safetensors library reads from a file."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def same(found: Array, expected: Array) -> bool:
    """Whether dtype, shape and bits are the same."""
    kinds = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return kinds and found.tobytes() == expected.tobytes()


def exercise(target: Target, directory: Path, sound: Mapping[str, Array]) -> bool:
    """Do with an input what commands do with it, in bounded time; whether all of it was accepted.

    Raises:
        Exception: Any that is not an error of ours; AssertionError for a wrong result.
    """
    with bounded_time():
        try:
            checkpoint = open_checkpoint(directory)
            target.use(checkpoint)
            found = read_values(checkpoint)
        except GemmaConvertError as error:
            check_message(error)
            return False
    if target.keeps_values:
        for name in found.keys() & sound.keys():
            assert same(found[name], sound[name]), f"{name} has other values"
    elif checkpoint.format == "safetensors":
        library = {
            k: v for p in directory.glob("*.safetensors") for k, v in library_values(p).items()
        }
        assert found.keys() == library.keys()
        for name, array in found.items():
            assert same(array, library[name]), f"{name} differs from the library's"
    return True


class Fuzzed:
    """A target in a directory of its own: makes input after input there."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.target = TARGETS[name]
        self.directory = directory / "input"
        self.target.build(self.directory)
        self.sound = read_values(open_checkpoint(self.directory))
        self.choices = [
            (path, path.read_bytes(), mutations)
            for pattern, mutations in self.target.files.items()
            for path in sorted(self.directory.glob(pattern))
        ]
        assert self.choices, name

    def try_input(self, number: int, seed: int = 0) -> bool:
        """Make the input of that number and use it; whether it was accepted.

        Raises:
            Exception: See `exercise`.
        """
        random = Random(f"{self.name} {seed} {number}")
        path, data, mutations = random.choice(self.choices)
        path.write_bytes(random.choice(mutations)(data, random))
        try:
            return exercise(self.target, self.directory, self.sound)
        finally:
            path.write_bytes(data)


def _model(directory: Path) -> None:
    write_base(directory, GEMMA3, base_arrays(GEMMA3, "model."))


def _small(directory: Path) -> None:
    values = {
        "layers.0.w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "layers.10.w": np.arange(5, dtype=np.int8),
        "empty": np.empty((0, 3), np.float16),
        "scalar": np.array(7.5),
    }
    write_base(directory, {}, values)
    (directory / "config.json").unlink()


def _sharded(directory: Path) -> None:
    write_base(directory, GEMMA3, base_arrays(GEMMA3, "model."), shards=2)


def _gemma4(directory: Path) -> None:
    write_base(directory, GEMMA4, base_arrays(GEMMA4, "model.language_model."))


def _peft(directory: Path) -> None:
    layer = "model.layers.1."
    values = {
        **peft_files.factors(f"{layer}self_attn.q_proj", 10, 42),
        **peft_files.factors(f"{layer}mlp.down_proj", 11, 10),
        "base_model.model.model.norm.modules_to_save.default.weight": np.arange(10.0),
        f"base_model.model.{layer}experts.base_layer.lora_A.weight": np.ones((6, 5), np.float32),
        f"base_model.model.{layer}experts.base_layer.lora_B.weight": np.ones((7, 6), np.float32),
    }
    peft_files.write(
        directory,
        values,
        rank_pattern={"down_proj": 2},
        alpha_pattern={"q_proj": 3},
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        modules_to_save=["norm"],
        peft_version="0.19.1",
        use_rslora=True,
    )


def _run(directory: Path) -> None:
    lora = {"rank": 2, "alpha": 5, "rules": [{"weight_qtype": "nf4", "tile_size": 32}]}
    write_run(directory, factor_arrays(GEMMA3), {"lora": lora})


def _sample(name: str) -> Callable[[Path], object]:
    return lambda directory: shutil.copytree(SAMPLES / name, directory)


JSON_FILE = (damage_json, damage_json, damage_bytes)
HEADER = (damage_header, damage_header, damage_bytes)
BINARY = (damage_bytes,)

TARGETS: Mapping[str, Target] = {
    "safetensors": Target(10000, _small, {"*.safetensors": HEADER}, look, keeps_values=False),
    "model header": Target(
        1500, _model, {"*.safetensors": HEADER}, look_and_plan, keeps_values=False
    ),
    "index": Target(2500, _sharded, {"*.index.json": JSON_FILE}, look),
    "config": Target(1500, _model, {"config.json": JSON_FILE}, look_and_plan),
    "gemma 4 config": Target(600, _gemma4, {"config.json": JSON_FILE}, look_and_plan),
    "adapter config": Target(2200, _peft, {"adapter_config.json": JSON_FILE}, look_and_resolve),
    "adapter keys": Target(
        2500, _peft, {"*.safetensors": HEADER}, look_and_resolve, keeps_values=False
    ),
    "orbax metadata": Target(
        400, _run, {"**/_METADATA": JSON_FILE, "**/_CHECKPOINT_METADATA": JSON_FILE}, look
    ),
    "orbax run": Target(200, _run, {"**/_CHECKPOINT_METADATA": (damage_json,)}, look_and_resolve),
    "ocdbt": Target(
        250,
        _sample("standard_flat"),
        {"**/*.ocdbt": BINARY, "**/d/*": BINARY, "_sharding": JSON_FILE},
        look,
        keeps_values=False,
    ),
    "zarr": Target(
        300,
        _sample("pytree_no_ocdbt"),
        {"**/.zarray": JSON_FILE, "**/[0-9]*": BINARY},
        look,
        keeps_values=False,
    ),
    "zarr3": Target(
        150,
        _sample("pytree_zarr3"),
        {"**/zarr.json": JSON_FILE, "**/_METADATA": JSON_FILE},
        look,
        keeps_values=False,
    ),
}
