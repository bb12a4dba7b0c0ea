"""Gemma 4 31B with all its 1188 tensors in sparse files: headers are real, weights are holes.

    python -m bench.sparse DIR

writes ``DIR/base``, the text model and the vision tower.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

from bench.inputs import BFLOAT16, SHARD_BYTES, Noise
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Tensor
from gemma_convert.convert.writers.safetensors import file_header, shard, write_index

MODEL = "gemma-4-31b"
MANIFEST = Path(__file__).parents[1] / "tests/data/manifests/hf/gemma-4-31B.json.gz"
"""Name to dtype and shape of each of its tensors."""


def make(directory: Path) -> None:
    """Write it, unless it is there."""
    if directory.is_dir():
        return
    (directory / "base").mkdir(parents=True)
    config = families()["gemma4"].config(MODEL)
    nothing = np.empty(0, BFLOAT16)
    listed = json.loads(gzip.decompress(MANIFEST.read_bytes()))
    tensors: dict[str, Tensor] = {name: Noise(tuple(s), nothing) for name, (_, s) in listed.items()}
    shards = shard(tensors, SHARD_BYTES)
    for part in shards:
        with (directory / "base" / part.name).open("wb") as file:
            header = file_header(part.tensors)
            file.write(header)
            file.truncate(len(header) + part.nbytes)
    write_index(directory / "base", shards)
    (directory / "base" / "config.json").write_text(json.dumps(config))


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    make(parser.parse_args().directory)


if __name__ == "__main__":
    main()
