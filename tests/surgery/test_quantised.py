"""Weights stored as codes and scales: Qwix's own trees dequantised, and what is no such tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.tensor import Array, ArrayTensor, Tensor
from gemma_convert.surgery.adapters.open import adapter_source
from gemma_convert.surgery.adapters.qwix import split_factors
from gemma_convert.surgery.quantised import Dequantised, dequantised, is_quantised, tiles_of
from gemma_convert.surgery.trained_on import TrainedOn, of_codes
from tests.checkpoints import BF16, F32, arrays, memory

SAMPLES = Path(__file__).parents[1] / "data" / "orbax_samples"
W = "layers.0.mlp.up_proj.kernel"


def qwix_dequantised(codes: Array, scale: Array, zero: Array | None = None) -> Array:
    import jax.numpy as jnp
    from qwix._src.core import qarray

    qtype = "nf4" if codes.dtype == ml_dtypes.uint4 else codes.dtype
    values = (jnp.asarray(part) if part is not None else None for part in (codes, scale, zero))
    return np.asarray(qarray.dequantize(qarray.QArray(*values, qtype)))


@pytest.mark.parametrize("sample", ["qlora_int8_full", "qlora_int4_full"])
def test_samples_as_qwix_dequantises_them(sample: str) -> None:
    tree = arrays(open_orbax(SAMPLES / sample))
    weights, pairs = split_factors(open_orbax(SAMPLES / sample))
    quantised = {name: t for name, t in weights.items() if isinstance(t, Dequantised)}
    assert quantised.keys() == pairs.keys()
    assert len(quantised) == 12
    assert not any(".array." in name or "_lora_" in name for name in weights)
    for name, tensor in quantised.items():
        expected = qwix_dequantised(tree[f"{name}.array.qvalue"], tree[f"{name}.array.scale"])
        assert tensor.dtype == expected.dtype == BF16
        assert tensor.numpy().tobytes() == expected.tobytes()
        box = tuple((size // 3, size - size // 4) for size in tensor.shape)
        part = expected[tuple(slice(*ends) for ends in box)]
        assert tensor.read(box).tobytes() == part.tobytes()


def parts(
    codes: Any, shape: tuple[int, ...], scales: tuple[int, ...], dtype: Any, *, zero: bool = False
) -> dict[str, Array]:
    """Random codes and scales; as many bits of a scale as its dtype has."""
    random = np.random.default_rng(2)
    low, high = (0, 16) if codes == ml_dtypes.uint4 else (-8, 8)
    found = {
        "qvalue": random.integers(low, high, shape).astype(np.int8).astype(codes),
        "scale": random.lognormal(0, 1, scales).astype(dtype),
    }
    if zero:
        found["zero_point"] = random.integers(-8, 8, scales).astype(np.int8).astype(codes)
    return found


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("scales", [(1, 1, 11), (1, 7, 11), (6, 14, 1), (3, 2, 11), (6, 14, 11)])
@pytest.mark.parametrize("codes", [np.int8, ml_dtypes.int4, ml_dtypes.float8_e4m3fn])
def test_any_tiles(codes: Any, scales: tuple[int, ...], zero: bool) -> None:
    for dtype in (BF16, np.float16, F32):
        values = parts(codes, (6, 14, 11), scales, dtype, zero=zero)
        tree = {f"{W}.array.{leaf}": ArrayTensor(array) for leaf, array in values.items()}
        (found,) = dequantised("run", tree).values()
        expected = qwix_dequantised(*values.values())
        assert found.dtype == expected.dtype == dtype
        assert found.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [BF16, np.float16, F32])
def test_nf4(dtype: Any) -> None:
    values = parts(ml_dtypes.uint4, (6, 14, 11), (1, 7, 11), dtype)
    found = Dequantised(ArrayTensor(values["qvalue"]), ArrayTensor(values["scale"]))
    assert found.numpy().tobytes() == qwix_dequantised(*values.values()).tobytes()


def test_the_tile_is_told_from_the_shapes() -> None:
    tiles = []
    for scales in ((1, 1, 11), (1, 7, 11), (3, 1, 11)):
        values = parts(np.int8, (6, 14, 11), scales, F32)
        tiles.append(Dequantised(*map(ArrayTensor, values.values())).tile)
    assert tiles == [None, 2, 2]


def test_a_tile_may_be_a_whole_axis() -> None:
    """By itself such a weight has no tiles; beside others it has theirs, if its axis is as long."""
    by_shape = {
        name: Dequantised(*map(ArrayTensor, parts(np.int8, shape, scales, F32).values()))
        for name, shape, scales in (
            ("tiles of 7", (14, 11), (2, 11)),
            ("one of 7", (7, 11), (1, 11)),
            ("one of 6", (6, 11), (1, 11)),
            ("tiles of 2", (14, 11), (7, 11)),
            ("7 times 6", (7, 6, 11), (1, 1, 11)),
        )
    }
    tiles, one, other, small, two = by_shape.values()
    assert tiles_of([tiles, one]) == tiles_of([one, tiles]) == [7]
    assert tiles_of([one, other]) == [None]
    assert tiles_of([one, tiles, other]) == [None, 7]
    assert tiles_of([tiles, small]) == [7, 2]
    assert tiles_of([tiles, two]) == [7, None]  # tiles lie along the last of the two
    weights = {"one": one, "tiles": tiles}
    assert of_codes(weights) == TrainedOn(({"weight_qtype": "int8", "tile_size": 7},), ("float32",))
    assert of_codes({**weights, "other": other}) == TrainedOn()


def test_other_weights_are_left_alone() -> None:
    tree: dict[str, Tensor] = {"final_norm.scale": ArrayTensor(np.ones(3, F32))}
    assert dequantised("run", tree) == tree
    assert not is_quantised(tree["final_norm.scale"])


def without(values: Mapping[str, Array], leaf: str) -> dict[str, Array]:
    return {key: array for key, array in values.items() if key != leaf}


GOOD = parts(np.int8, (6, 14), (6, 7), F32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (without(GOOD, "scale"), f"run: {W}.array.scale is missing, of a quantised weight; the"),
        (without(GOOD, "qvalue"), f"run: {W}.array.qvalue is missing, of a quantised weight; the"),
        (
            {**GOOD, "scale": np.ones((6, 4), F32)},
            rf"run: {W}.array.scale has shape \[6, 4\], which does not divide that of its codes, "
            r"\[6, 14\]; codes and scales belong",
        ),
        ({**GOOD, "scale": np.ones(14, F32)}, r"scale has shape \[14\], which does not divide"),
        ({**GOOD, "scale": np.ones((0, 7), F32)}, r"scale has shape \[0, 7\], which does not"),
        ({**GOOD, "zero_point": np.ones((4, 7), np.int8)}, r"zero_point has shape \[4, 7\]"),
        (
            {**GOOD, "scale": np.ones((6, 7), np.int8)},
            f"run: {W}: codes of int8 with scales of int",
        ),
        ({**GOOD, "qvalue": np.ones((6, 14), np.int32)}, "codes of int32 with scales of float32"),
    ],
)
def test_what_is_no_quantised_weight(values: dict[str, Array], message: str) -> None:
    tree = {f"{W}.array.{leaf}": array for leaf, array in values.items()}
    with pytest.raises(InputError, match=message):
        split_factors(memory(tree, source="run"))


def test_factors_of_a_quantised_tree_as_an_adapter() -> None:
    source = adapter_source(open_orbax(SAMPLES / "qlora_int8_full"))
    assert len(source.checkpoint) == 24
    assert all("_lora_" in name for name in source.checkpoint)
    assert "not the 26 weights beside them" in source.checkpoint.notes[-1]
