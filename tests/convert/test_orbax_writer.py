"""The Orbax writer against the libraries that read its output: Orbax, Tunix, tensorstore."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError, OutputError
from gemma_convert.convert.read_ahead import AHEAD, WORKERS
from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.tensor import Array, ArrayTensor, Box, Tensor, extent
from gemma_convert.convert.writers.orbax import IN_FLIGHT, write_orbax

BF16 = np.dtype(ml_dtypes.bfloat16)
HELD = IN_FLIGHT + WORKERS + AHEAD + 2
"""Blocks at once: those being written, those read ahead, one in hand and one just handed over."""
NO_SHARDING = "ignore:Sharding info not provided when restoring:UserWarning"

# flax 0.12.8 about Tunix 0.1.7's own model code.
pytestmark = pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning")


def bits(seed: int, shape: tuple[int, ...], dtype: Any = BF16) -> Array:
    """Random bytes: every bit pattern of ``dtype``, NaN payloads and infinities included."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(count), dtype).reshape(shape)


def mixed() -> dict[str, Array]:
    """Every rank and dtype that Tunix saves: int8 and int4 come from QLoRA."""
    return {
        "embedder.input_embedding": bits(1, (41, 10)),
        "final_norm.scale": bits(2, (10,)),
        "layers.0.attn.kv_einsum.w": bits(3, (2, 3, 10, 14)),
        "layers.0.attn.q_einsum.w": bits(4, (6, 10, 14), np.float32),
        "layers.0.skip_scale": bits(5, (), np.float32),
        "layers.10.mlp.gate_proj.kernel": bits(6, (10, 11), np.float16),
        "layers.2.mlp.up_proj.kernel.array.qvalue": bits(7, (10, 11), np.int8),
        "layers.3.mlp.up_proj.kernel.array.qvalue": (bits(8, (10, 11), np.int8) >> 4).astype(
            ml_dtypes.int4
        ),
    }


def checkpoint(arrays: dict[str, Array]) -> Checkpoint:
    return Checkpoint({name: ArrayTensor(array) for name, array in arrays.items()})


def test_arrays_whose_last_block_is_short_are_read_back_by_our_reader(tmp_path: Path) -> None:
    """41 rows in tiles of 9: five are left."""
    arrays = mixed()
    write_orbax(checkpoint(arrays), tmp_path, block_bytes=100)
    found = open_orbax(tmp_path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].numpy().tobytes() == array.tobytes(), name


def flat(tree: Any, prefix: str = "") -> dict[str, Array]:
    """A restored tree by '.'-joined names, nnx's last key ``value`` left out."""
    if not isinstance(tree, dict):
        return {prefix.removesuffix(".value"): np.asarray(tree)}
    return {
        name: array
        for key, child in tree.items()
        for name, array in flat(child, f"{prefix}.{key}" if prefix else key).items()
    }


def assert_same_bits(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


class Gauge:
    """The bytes of arrays handed out and still alive, now and at most."""

    alive = most = 0

    def hold(self, array: Array) -> None:
        self.alive += array.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(array, self.release, array.nbytes)

    def release(self, nbytes: int) -> None:
        self.alive -= nbytes


class Recorder(Tensor):
    """Zeros that record every box read."""

    def __init__(self, shape: tuple[int, ...], gauge: Gauge) -> None:
        self.shape, self.dtype, self.gauge = shape, BF16, gauge
        self.boxes: list[Box] = []

    def read(self, box: Box) -> Array:
        self.boxes.append(box)
        array = np.zeros(extent(box), self.dtype)
        self.gauge.hold(array)
        return array


class Broken(Tensor):
    """A tensor that fails when read."""

    def __init__(self, error: BaseException) -> None:
        self.shape, self.dtype, self.error = (3, 5), BF16, error

    def read(self, box: Box) -> Array:
        raise self.error


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`mixed` in chunks of 100 bytes, so that every axis gets cut somewhere."""
    directory = tmp_path_factory.mktemp("mixed")
    write_orbax(checkpoint(mixed()), directory, block_bytes=100)
    return directory


@pytest.mark.filterwarnings(NO_SHARDING)
@pytest.mark.parametrize("reader", ["PyTreeCheckpointer", "StandardCheckpointer"])
def test_orbax_restores_without_a_target(written: Path, reader: str) -> None:
    import jax
    import orbax.checkpoint as ocp

    with getattr(ocp, reader)() as checkpointer:
        tree = checkpointer.restore(written / "0" / "model_params")
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    assert tree["final_norm"]["scale"].keys() == {"value"}
    assert_same_bits(flat(tree), mixed())


def test_tensorstore_reads_a_range_of_rows(written: Path) -> None:
    import tensorstore as ts

    spec = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": f"file://{written}/0/model_params/",
            "path": "embedder.input_embedding.value/",
        },
    }
    store = ts.open(spec, open=True, read=True).result()
    assert store.chunk_layout.read_chunk.shape == (9, 5)
    rows = store[17:23].read().result()
    assert rows.tobytes() == mixed()["embedder.input_embedding"][17:23].tobytes()


def test_devices_may_differ_when_restoring(written: Path) -> None:
    """A machine with eight devices restores what was written on one, without a target."""
    code = (
        "import sys, warnings, jax, orbax.checkpoint as ocp; warnings.simplefilter('ignore')\n"
        "assert jax.device_count() == 8\n"
        "tree = ocp.PyTreeCheckpointer().restore(sys.argv[1])\n"
        "assert tree['final_norm']['scale']['value'].shape == (10,)"
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-c", code, str(written / "0" / "model_params")], check=True, env=flags
    )


def tunix_model(seed: int) -> Any:
    """Gemma 3 with odd dimensions, nothing neutral: norms are random too."""
    import jax
    from flax import nnx
    from tunix.models.gemma3.model import Gemma3, ModelConfig

    config = ModelConfig(
        num_layers=7,
        num_embed=41,
        embed_dim=10,
        hidden_dim=11,
        num_heads=6,
        num_kv_heads=3,
        head_dim=14,
        sliding_window_size=5,
    )
    model = Gemma3(config, rngs=nnx.Rngs(seed))
    state = nnx.state(model)
    leaves, structure = jax.tree.flatten(state)
    random = [bits(seed + i, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    nnx.update(model, jax.tree.unflatten(structure, [jax.numpy.asarray(a) for a in random]))
    return model


def tunix_arrays(model: Any) -> dict[str, Array]:
    from flax import nnx

    return flat(nnx.to_pure_dict(nnx.state(model)))


def test_tunix_restores_its_model(tmp_path: Path) -> None:
    from tunix.sft.checkpoint_manager import CheckpointManager

    source, target = tunix_model(100), tunix_model(900)
    arrays = tunix_arrays(source)
    assert len(arrays) == 2 + 7 * 12
    write_orbax(
        checkpoint(arrays), tmp_path, block_bytes=200, custom_metadata={"lora": {"alpha": 7.5}}
    )

    manager = CheckpointManager(str(tmp_path))
    step, metadata = manager.maybe_restore(target)
    manager.close()
    assert (step, metadata) == (0, {"lora": {"alpha": 7.5}})
    assert_same_bits(tunix_arrays(target), arrays)


def test_files_are_what_tunix_writes(tmp_path: Path) -> None:
    from tunix.sft.checkpoint_manager import CheckpointManager

    ours, theirs = tmp_path / "ours", tmp_path / "tunix"
    model = tunix_model(100)
    manager = CheckpointManager(str(theirs))
    manager.save(0, model, force=True)
    manager.close()
    write_orbax(checkpoint(tunix_arrays(model)), ours)

    assert names(ours) == names(theirs)
    for name in ["0/model_params/_METADATA", "0/model_params/array_metadatas/process_0"]:
        assert parsed(ours / name) == parsed(theirs / name)
    assert parsed(ours / SHARDING).keys() == parsed(theirs / SHARDING).keys()
    assert parsed(ours / STEP).keys() == parsed(theirs / STEP).keys()
    assert parsed(ours / STEP)["item_handlers"] == parsed(theirs / STEP)["item_handlers"]


STEP = "0/_CHECKPOINT_METADATA"
SHARDING = "0/model_params/_sharding"


def names(root: Path) -> set[str]:
    """Files under ``root``, those of OCDBT's data left out: their names are random."""
    paths = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    return {path.as_posix() for path in paths if path.parent.name != "d"}


def parsed(path: Path) -> Any:
    return json.loads(path.read_text())


def test_memory_is_bounded_by_blocks(tmp_path: Path) -> None:
    tensor = Recorder((1009, 64), Gauge())
    block = 10 * 64 * 2  # tiles of 29 x 22
    whole, right, last = 29 * 22 * 2, 29 * 20 * 2, 23 * 22 * 2
    told: list[int] = []
    write_orbax(Checkpoint({"w": tensor}), tmp_path, block_bytes=block, progress=told.append)
    rows = [(i, min(i + 29, 1009)) for i in range(0, 1009, 29)]
    assert sorted(tensor.boxes) == [(r, c) for r in rows for c in ((0, 22), (22, 44), (44, 64))]
    assert block < tensor.gauge.most <= HELD * block
    assert told == [whole, whole, right] * 34 + [last, last, 23 * 20 * 2]


def test_small_tensors_share_the_bound(tmp_path: Path) -> None:
    """Many small arrays are in flight together, but no more bytes than `HELD` blocks."""
    gauge = Gauge()
    tensors = {f"layers.{i}.scale": Recorder((8,), gauge) for i in range(50)}
    write_orbax(Checkpoint(tensors), tmp_path, block_bytes=40)
    assert 40 < gauge.most <= HELD * 40
    assert all(tensor.boxes == [((0, 8),)] for tensor in tensors.values())


@pytest.mark.parametrize("shape", [(41, 10), (2, 3, 10, 14), (1, 1000), (7,)])
def test_each_block_is_one_whole_chunk(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = Recorder(shape, Gauge())
    write_orbax(Checkpoint({"w": tensor}), tmp_path, block_bytes=100)
    arrays = parsed(tmp_path / "0/model_params/array_metadatas/process_0")["array_metadatas"]
    chunk = arrays[0]["array_metadata"]["chunk_shape"]
    for box in tensor.boxes:
        for (start, stop), size, step in zip(box, shape, chunk, strict=True):
            assert start % step == 0
            assert stop == min(start + step, size)


def test_errors_of_the_tensors_pass_through(tmp_path: Path) -> None:
    error = InputError("shard 2 is cut off", "download it again")
    with pytest.raises(InputError) as caught:
        write_orbax(Checkpoint({"w": Broken(error)}), tmp_path)
    assert caught.value is error
    assert not (tmp_path / "0").exists()


def test_an_interrupt_passes_through(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_orbax(Checkpoint({"w": Broken(KeyboardInterrupt())}), tmp_path)


def test_other_errors_say_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"Orbax could not write .*: No space left; check"):
        write_orbax(Checkpoint({"w": Broken(OSError("No space left"))}), tmp_path)


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="check the free space and permissions"):
        write_orbax(checkpoint(mixed()), tmp_path / "file")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"w": bits(1, (0, 3))}, r"w has shape \(0, 3\); Orbax stores no empty arrays"),
        ({"a": bits(1, (3,)), "a.value.b": bits(2, (3,))}, "a.value.b lies inside another tensor"),
        ({"a.value": bits(1, (3,)), "a": bits(2, (3,))}, "a ends inside another tensor"),
    ],
)
def test_names_and_shapes_that_cannot_be_stored(
    tmp_path: Path, arrays: dict[str, Array], message: str
) -> None:
    with pytest.raises(OutputError, match=message):
        write_orbax(checkpoint(arrays), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_import_is_light_and_a_write_prints_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from gemma_convert.convert.checkpoint import Checkpoint\n"
        "from gemma_convert.convert.tensor import ArrayTensor\n"
        "from gemma_convert.convert.writers.orbax import write_orbax\n"
        "assert not {'jax', 'orbax', 'tensorstore'} & sys.modules.keys()\n"
        "write_orbax(Checkpoint({'w': ArrayTensor(np.ones((3, 5)))}), Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
