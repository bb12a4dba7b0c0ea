"""Codes and scales against Qwix's own, on the same arrays; read by boxes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.tensor import Array, ArrayTensor, Box
from gemma_convert.surgery import quantise
from gemma_convert.surgery.quantise import QTYPES, Scheme, quantised
from gemma_convert.surgery.quantised import Dequantised
from tests.checkpoints import BF16, F32

F16 = np.dtype(np.float16)
WEIGHTS = {
    "kv (s k d h)": ((2, 3, 30, 7), [2]),
    "attn_vec (n h d)": ((6, 14, 11), [0, 1]),
    "down (f d)": ((88, 15), [0]),
}
"""Shapes, and the contracted axes of each."""

TILES = {None: "none", 1: "of one value", 2: "of two", 0.5: "of half the axis"}


def random(shape: tuple[int, ...], dtype: Any) -> Array:
    """Values of many sizes: in each matrix some tiles are all zero, or too small to be scaled."""
    generator = np.random.default_rng(3)
    values = generator.normal(0, 0.5, shape) * generator.lognormal(0, 1, shape)
    values[..., 0] = 0
    values[..., 1] *= 2.0**-70
    return values.astype(dtype)


def ours(values: Array, scheme: Scheme, contracted: list[int]) -> Dequantised:
    sizes = scheme.groups("w", values.shape, contracted)
    return quantised(ArrayTensor(values), scheme, sizes)


def qwix_array(values: Array, scheme: Scheme, contracted: list[int]) -> Any:
    """``values`` quantised by Qwix."""
    import jax.numpy as jnp
    from qwix._src.core import qarray

    how = qarray.HowToQuantize(
        qtype=scheme.qtype if scheme.qtype == "nf4" else getattr(jnp, scheme.qtype),
        channelwise_axes=[axis for axis in range(values.ndim) if axis not in contracted],
        tiled_axes={contracted[-1]: scheme.tile} if scheme.tile else {},
    )
    return qarray.quantize(jnp.asarray(values), how)


@pytest.mark.parametrize("tile", TILES, ids=TILES.get)
@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_the_same_bits_as_qwix(dtype: Any, qtype: str, tile: Any) -> None:
    from qwix._src.core import qarray

    scheme = Scheme(qtype, tile)
    for shape, contracted in WEIGHTS.values():
        values = random(shape, dtype)
        expected, found = (f(values, scheme, contracted) for f in (qwix_array, ours))
        for part, theirs in ((found.codes, expected.qvalue), (found.scale, expected.scale)):
            assert (part.shape, part.dtype) == (theirs.shape, theirs.dtype)
            assert part.numpy().tobytes() == np.asarray(theirs).tobytes()
        weight = np.asarray(qarray.dequantize(expected))
        assert found.dtype == weight.dtype == dtype
        assert found.numpy().tobytes() == weight.tobytes()


def test_the_values_of_nf4_are_those_of_qwix() -> None:
    from qwix._src.core import numerics

    assert quantise.NF4.tobytes() == np.asarray(numerics.get_nf4_buckets()).tobytes()


def test_halfway_between_two_values_of_nf4() -> None:
    """Both are as near in float32: the lower one, as argmin picks it."""
    from qwix._src.core import numerics

    middles = (quantise.NF4[1:] + quantise.NF4[:-1]) / 2
    near = [np.nextafter(middles, F32.type(side)) for side in (-2, 2)]
    values = np.concatenate([[1], middles, *near]).astype(F32)[:, None]
    codes = ours(values, Scheme("nf4"), [0]).codes.numpy()
    assert np.array_equal(codes[:, 0], np.asarray(numerics.fp_to_nf4(values[:, 0])))
    low, high = (np.abs(side - middles) for side in (quantise.NF4[:-1], quantise.NF4[1:]))
    ties = np.flatnonzero(low == high)
    assert len(ties) > 5
    assert np.array_equal(codes[1:16, 0][ties], ties)


@pytest.mark.parametrize("tile", [None, 2, 0.5])
@pytest.mark.parametrize("qtype", QTYPES)
def test_any_box(qtype: str, tile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A box gives the same values as the whole: tiles cut in two, one value, in any order."""
    monkeypatch.setattr(quantise, "blocks", lambda tensor: small_blocks(tensor.shape))
    for shape, contracted in WEIGHTS.values():
        values = random(shape, BF16)
        whole = ours(values, Scheme(qtype, tile), contracted).numpy()
        lazy = ours(values, Scheme(qtype, tile), contracted)
        generator = np.random.default_rng(8)
        for _ in range(20):
            ends = [sorted(generator.choice(size + 1, 2, replace=False)) for size in shape]
            box: Box = tuple((int(start), int(stop)) for start, stop in ends)
            expected = whole[tuple(slice(*pair) for pair in box)]
            assert lazy.read(box).tobytes() == expected.tobytes()


def small_blocks(shape: tuple[int, ...]) -> Any:
    """Boxes that cover ``shape`` and do not follow its tiles."""
    rest = tuple((0, size) for size in shape[1:])
    for start in range(0, shape[0], 3):
        yield ((start, min(start + 3, shape[0])), *rest)


class Counted(ArrayTensor):
    """Tells how much of it was read at most at once, and in all."""

    most = total = 0

    def read(self, box: Box) -> Array:
        array = super().read(box)
        self.most, self.total = max(self.most, array.size), self.total + array.size
        return array


def test_memory_is_that_of_the_box() -> None:
    weight = Counted(random((40, 30, 7), BF16))
    scheme = Scheme("int4", 6)
    lazy = quantised(weight, scheme, scheme.groups("w", weight.shape, [1]))
    assert lazy.read(((2, 4), (7, 17), (0, 3))).shape == (2, 10, 3)
    assert weight.most == 2 * 12 * 3  # two tiles


def test_scales_of_a_whole_axis_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "blocks", lambda tensor: small_blocks(tensor.shape))
    weight = Counted(random((88, 15), BF16))
    lazy = quantised(weight, Scheme("int8"), [88, 1])
    for start in range(0, 88, 11):
        lazy.read(((start, start + 11), (0, 15)))
    assert weight.total == 2 * weight.size  # once for the scales, once for the codes
    assert weight.most == 11 * 15


@pytest.mark.parametrize(("tile", "size"), [(7, 7), (62, 62), (0.4, 12), (1e-3, 0)])
def test_a_tile_that_does_not_divide(tile: Any, size: int) -> None:
    with pytest.raises(AdapterError) as caught:
        Scheme("int8", tile).groups("layers.0.attn.q_einsum.w", (6, 31, 8), [1])
    assert str(caught.value) == (
        f"layers.0.attn.q_einsum.w: tiles of {size} do not divide axis 1 of [6, 31, 8]; "
        "pass the tile_size of the training run"
    )


def test_the_dtypes_of_codes() -> None:
    values = random((10, 3), F32)
    kinds = [ours(values, Scheme(qtype), [0]).codes.dtype for qtype in QTYPES]
    assert kinds == [np.int8, np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)]
