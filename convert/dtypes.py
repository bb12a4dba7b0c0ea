"""The dtypes of weights, and how safetensors, numpy and ``config.json`` spell each of them.

Sources: the dtype list of safetensors 0.7 (``safetensors/src/tensor.rs``), ml_dtypes 0.7, and
torch's names, which are what ``config.json`` holds. The packed types of safetensors (F4, F6_E2M3,
F6_E3M2) are left out: numpy has no array of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from gemma_convert.convert.errors import InputError

DType = np.dtype[Any]


@dataclass(frozen=True)
class Spelling:
    """One dtype in the three vocabularies.

    Attributes:
        safetensors: As in a safetensors header.
        numpy: The numpy dtype (little-endian, as safetensors stores it).
        config: As in ``config.json`` (torch's name).
    """

    safetensors: str
    numpy: DType
    config: str


SPELLINGS: tuple[Spelling, ...] = (
    Spelling("BF16", np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    Spelling("F16", np.dtype(np.float16), "float16"),
    Spelling("F32", np.dtype(np.float32), "float32"),
    Spelling("F64", np.dtype(np.float64), "float64"),
    Spelling("F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
    Spelling("F8_E5M2", np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2"),
    Spelling("F8_E8M0", np.dtype(ml_dtypes.float8_e8m0fnu), "float8_e8m0fnu"),
    Spelling("I8", np.dtype(np.int8), "int8"),
    Spelling("I16", np.dtype(np.int16), "int16"),
    Spelling("I32", np.dtype(np.int32), "int32"),
    Spelling("I64", np.dtype(np.int64), "int64"),
    Spelling("U8", np.dtype(np.uint8), "uint8"),
    Spelling("U16", np.dtype(np.uint16), "uint16"),
    Spelling("U32", np.dtype(np.uint32), "uint32"),
    Spelling("U64", np.dtype(np.uint64), "uint64"),
    Spelling("BOOL", np.dtype(np.bool_), "bool"),
    Spelling("C64", np.dtype(np.complex64), "complex64"),
)

_BY_SAFETENSORS = {row.safetensors: row for row in SPELLINGS}
_BY_NUMPY = {row.numpy: row for row in SPELLINGS}
_BY_CONFIG = {row.config: row for row in SPELLINGS}


def from_safetensors(name: str) -> DType:
    """The numpy dtype of a safetensors dtype, such as ``BF16``.

    Raises:
        InputError: An unknown or packed dtype.
    """
    if name not in _BY_SAFETENSORS:
        raise InputError(
            f"unknown safetensors dtype {name!r}", f"known are {', '.join(_BY_SAFETENSORS)}"
        )
    return _BY_SAFETENSORS[name].numpy


def to_safetensors(dtype: DType) -> str:
    """The safetensors name of a numpy dtype.

    Raises:
        InputError: A dtype that safetensors cannot store, such as int4.
    """
    return _of_numpy(dtype).safetensors


def from_config(name: str) -> DType:
    """The numpy dtype that ``config.json`` means by ``bfloat16`` or ``torch.bfloat16``.

    Raises:
        InputError: An unknown dtype.
    """
    short = name.removeprefix("torch.")
    if short not in _BY_CONFIG:
        raise InputError(f"unknown dtype {name!r}", f"known are {', '.join(_BY_CONFIG)}")
    return _BY_CONFIG[short].numpy


def to_config(dtype: DType) -> str:
    """How ``config.json`` spells a numpy dtype.

    Raises:
        InputError: A dtype without a spelling.
    """
    return _of_numpy(dtype).config


def is_weight(dtype: DType) -> bool:
    """Whether weights of this type can be computed with as they are.

    Not so integers and 8-bit floats: those are codes that belong to scales stored elsewhere.
    """
    return is_float(dtype) and np.dtype(dtype).itemsize >= 2


def is_float(dtype: DType) -> bool:
    """Whether it is a floating-point type; numpy itself does not know bfloat16 as one."""
    return "float" in np.dtype(dtype).name


def _of_numpy(dtype: DType) -> Spelling:
    dtype = np.dtype(dtype)
    if dtype not in _BY_NUMPY:
        raise InputError(
            f"dtype {dtype} cannot be stored in safetensors",
            f"cast it to one of {', '.join(_BY_CONFIG)}",
        )
    return _BY_NUMPY[dtype]
