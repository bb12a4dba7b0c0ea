"""Safetensors files of tests: golden bytes, any header at all, directories with an index."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

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
