"""Casting: one rounding to nearest even, and no value that silently becomes infinite."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import OutputError
from gemma_convert.convert.tensor import ArrayTensor, cast, rounded
from gemma_convert.convert.writers.orbax import write_orbax
from gemma_convert.convert.writers.safetensors import shard, write_shard

LARGE = np.array([[1.0, 70000.0]], np.float32)
FLOAT16 = np.dtype(np.float16)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.float8_e4m3fn])
def test_a_value_that_does_not_fit_is_refused(dtype: type) -> None:
    with pytest.raises(OutputError, match=r"a value as large as 70000 does not fit .*bfloat16 or"):
        rounded(LARGE, np.dtype(dtype))


def test_what_was_infinite_stays_so() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 2.5], np.float32)
    np.testing.assert_array_equal(rounded(values, FLOAT16), values.astype(np.float16))


def test_ties_go_to_even() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    expected = [1.0, 1 + 2**-6]
    assert rounded(values, np.dtype(ml_dtypes.bfloat16)).astype(np.float32).tolist() == expected


def test_the_writers_name_the_tensor(tmp_path: Path) -> None:
    tensors = {"layers.0.w": cast(ArrayTensor(LARGE), FLOAT16)}
    with pytest.raises(OutputError, match=r"^layers\.0\.w: a value as large as 70000"):
        write_shard(tmp_path, shard(tensors)[0], lambda _: None)
    with pytest.raises(OutputError, match=r"^layers\.0\.w.*: a value as large as 70000"):
        write_orbax(Checkpoint(tensors), tmp_path / "orbax")
