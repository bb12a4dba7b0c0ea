"""Time and peak memory of a LoRA merge at Gemma 4 31B's tensor shapes, next to ``cp``.

    python bench/merge.py --layers 2 --dir /some/disk

Makes a base with the 31B's true shapes cut to ``--layers`` (the embedding alone is 2.8 GB) and a
rank-64 adapter of every module, then in turn copies the base with ``cp`` and ``sync`` (the limit
of the disk) and merges with ``gemma-convert orbax-to-hf`` in a process of its own. Prints medians,
the ratio, and the largest resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.random_model import random_factors
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array, Box, Tensor, extent
from gemma_convert.convert.writers.hf import write_hf
from gemma_convert.convert.writers.orbax import write_orbax

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHARD_BYTES = 5 * 10**9


class Noise(Tensor):
    """Random weights of any size from a small pool, made as fast as memory allows."""

    dtype = BFLOAT16

    def __init__(self, shape: tuple[int, ...], pool: Array) -> None:
        self.shape = shape
        self.pool = pool

    def read(self, box: Box) -> Array:
        """Values of the pool, again and again."""
        return np.resize(self.pool, extent(box))


def config(layers: int) -> dict[str, Any]:
    """The 31B's text config with fewer layers."""
    dims = {**families()["gemma4"].models["gemma-4-31b"], "num_hidden_layers": layers}
    return {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", **dims}}


def make_inputs(directory: Path, layers: int) -> None:
    """Write ``directory/base`` and ``directory/run``, unless they are there."""
    if directory.exists():
        return
    directory.mkdir(parents=True)
    model = read_model(config(layers), families())
    pool = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(BFLOAT16)
    prefix = model.family.nested_prefix
    tensors: dict[str, Tensor] = {
        prefix + name: Noise(p.row.cells[HF.name].pattern.shape(p.sizes), pool)
        for p in model.parameters()
        for name, _ in p.parts(HF.name)
    }
    (directory / "base").mkdir()
    base = Checkpoint(tensors, config=config(layers))
    write_hf(base, directory / "base", max_shard_bytes=SHARD_BYTES, progress=lambda _: None)
    (directory / "run").mkdir()
    factors = random_factors(model, Spelling(TUNIX, ""), 64, np.dtype(np.float32))
    write_orbax(factors, directory / "run")


def timed(command: list[str], sync: Path | None) -> tuple[float, int]:
    """Run a command; return wall seconds and its largest resident set in bytes."""
    start = time.monotonic()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    if sync is not None:
        for path in sync.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    return time.monotonic() - start, usage.ru_maxrss * 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, required=True, help="needs three times the base")
    options = parser.parse_args()
    directory = options.dir / f"merge-{options.layers}"
    make_inputs(directory, options.layers)
    base, run, out = directory / "base", directory / "run", directory / "out"
    merge = [sys.executable, "-m", "gemma_convert", "orbax-to-hf", str(run), "--quiet"]
    merge += ["--base", str(base), "--out", str(out), "--alpha", "64"]
    copies, merges, peaks = [], [], []
    for _ in range(options.runs):
        shutil.rmtree(out, ignore_errors=True)
        copies.append(timed(["cp", "-r", str(base), str(out)], out)[0])
        shutil.rmtree(out)
        seconds, peak = timed(merge, None)
        merges.append(seconds)
        peaks.append(peak)
    size = sum(path.stat().st_size for path in base.iterdir())
    shutil.rmtree(out)
    print(
        json.dumps(
            {
                "base_bytes": size,
                "cp_seconds": statistics.median(copies),
                "merge_seconds": statistics.median(merges),
                "ratio": statistics.median(m / c for m, c in zip(merges, copies, strict=True)),
                "peak_rss_bytes": max(peaks),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
