"""Orbax checkpoints of tests: samples, trees saved on the spot, and what orbax itself restores.

``tests/data/orbax_samples`` was written by Tunix 0.1.7 and orbax 0.12.8.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from gemma_convert.convert.readers import open_orbax

SAMPLES = Path(__file__).parent / "data" / "orbax_samples"
TREES = (
    "full_base/10/model_params",
    "lora_only/10/model_params",
    "lora_only/10/optimizer_state",
    "qlora_int4_full/10/model_params",
    "qlora_int8_full/10/model_params",
    "pytree_no_ocdbt",
    "pytree_zarr3",
    "standard_flat",
    "standard_nested",
)


def leaves(tree: Any, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """A restored tree as name to array."""
    if isinstance(tree, dict):
        parts = [leaves(value, (*keys, str(key))) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        parts = [leaves(value, (*keys, str(i))) for i, value in enumerate(tree)]
    else:
        return {".".join(keys): tree}
    return {name: leaf for part in parts for name, leaf in part.items()}


def restored(path: Path) -> dict[str, np.ndarray]:
    """What orbax itself restores, as numpy arrays."""
    import jax
    import orbax.checkpoint as ocp

    checkpointer = ocp.PyTreeCheckpointer()
    structure = checkpointer.metadata(path).item_metadata.tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure)
    return leaves(checkpointer.restore(path, restore_args=args))


def save(path: Path, tree: Any, *, ocdbt: bool = True, zarr3: bool = False, **more: Any) -> Path:
    """Save a tree as one of its own."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, **more))
    return path


def read_all(path: Path) -> None:
    for tensor in open_orbax(path).values():
        tensor.numpy()


def copy(sample: str, to: Path) -> Path:
    shutil.copytree(SAMPLES / sample, to)
    return to


def edit(path: Path, change: Any) -> None:
    """Change a JSON file in place."""
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def unfinished_bucket_copy(step: Path) -> None:
    """Make a step what an unfinished save in a bucket looks like once it was copied."""
    (step / "commit_success.txt").unlink()
    edit(step / "_CHECKPOINT_METADATA", lambda table: table.update(commit_timestamp_nsecs=None))


def step_root(tmp_path: Path) -> Path:
    """A root with steps 9 (full), 10 (LoRA, the newest finished) and two unfinished ones."""
    copy("full_base/10", tmp_path / "root" / "9")
    copy("lora_only/10", tmp_path / "root" / "10")
    copy("lora_only/10", tmp_path / "root" / "20.orbax-checkpoint-tmp")
    unfinished_bucket_copy(copy("lora_only/10", tmp_path / "root" / "30"))
    return tmp_path / "root"
