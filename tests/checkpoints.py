"""Tiny checkpoints on the disk, for tests of whole jobs and of the command line.

Dimensions are distinct and coprime where the model allows it (global heads have sizes of their
own), nothing is neutral. Hugging Face directories are written with the safetensors library, not
with the writer under test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from gemma_convert.cli import main
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.random_model import random_factors, random_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array, ArrayTensor
from gemma_convert.convert.writers.orbax import write_orbax

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
ALPHA = 5.0
RANK = 2
NATIVE = Spelling(TUNIX, "")
PREFIXES = ("model.", "language_model.model.", "model.language_model.")

GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "vocab_size": 23,
    "hidden_size": 10,
    "intermediate_size": 11,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 7,
    "tie_word_embeddings": True,
}

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "vocab_size": 23,
        "hidden_size": 10,
        "intermediate_size": 11,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_global_key_value_heads": 2,
        "head_dim": 7,
        "global_head_dim": 13,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
}

CONFIGS = {"gemma3": GEMMA3, "gemma4": GEMMA4}
USUAL_PREFIX = {"gemma3": "model.", "gemma4": "model.language_model."}

NESTED = {"model_type": "gemma3", "text_config": GEMMA3}
"""A config.json in which `GEMMA3` is the text part, as names with a wrapper's prefix want it."""

FORMS = (
    (GEMMA3, "model."),
    (NESTED, "language_model.model."),
    (NESTED, "model.language_model."),
    (GEMMA4["text_config"], "model."),
    (GEMMA4, "model.language_model."),
)
"""Configs with the prefixes that go with them."""


def arrays(checkpoint: Mapping[str, Any]) -> dict[str, Array]:
    """All values of a checkpoint."""
    return {name: tensor.numpy() for name, tensor in checkpoint.items()}


def memory(values: Mapping[str, Array], **fields: Any) -> Checkpoint:
    """A checkpoint of arrays."""
    return Checkpoint({name: ArrayTensor(array) for name, array in values.items()}, **fields)


def base_arrays(
    config: Mapping[str, Any], prefix: str, dtype: np.dtype[Any] = BF16, seed: int = 0
) -> dict[str, Array]:
    """Random weights of ``config``'s model under Hugging Face names."""
    return arrays(random_model(config, Spelling(HF, prefix), dtype, seed))


def tunix_arrays(
    config: Mapping[str, Any], dtype: np.dtype[Any] = BF16, seed: int = 0
) -> dict[str, Array]:
    """Random weights of ``config``'s model under Tunix's names."""
    return arrays(random_model(config, NATIVE, dtype, seed))


def factor_arrays(
    config: Mapping[str, Any], dtype: np.dtype[Any] = BF16, seed: int = 1
) -> dict[str, Array]:
    """Random LoRA factors of every matrix of ``config``'s model, as Tunix stores them."""
    model = read_model(config, families())
    return arrays(random_factors(model, NATIVE, RANK, dtype, seed))


def write_base(
    directory: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Array],
    *,
    shards: int = 1,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A Hugging Face directory as a Hub download leaves it, with an index if there are shards."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    if not weights:
        return directory
    names = sorted(weights)
    parts = [names[i::shards] for i in range(shards)]
    file_names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    )
    for file_name, part in zip(file_names, parts, strict=True):
        save_file({n: weights[n] for n in part}, directory / file_name, metadata={"format": "pt"})
    if shards > 1:
        weight_map = {n: f for f, part in zip(file_names, parts, strict=True) for n in part}
        index = {
            "metadata": {"total_size": sum(a.nbytes for a in weights.values())},
            "weight_map": weight_map,
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_run(
    directory: Path, values: Mapping[str, Array], metadata: Mapping[str, Any] | None = None
) -> Path:
    """An Orbax checkpoint root as Tunix saves it, with one step."""
    directory.mkdir(parents=True)
    write_orbax(memory(values), directory, custom_metadata=metadata)
    return directory


def read_hf(directory: Path) -> dict[str, Array]:
    """Every tensor of every safetensors file, by the safetensors library; no name twice."""
    found: dict[str, Array] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in found, f"{name} is written twice"
                found[name] = file.get_tensor(name)
    return found


def assert_same_bits(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """The same names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def run_cli(*words: Any) -> int:
    """The command line, in this process."""
    return main([str(word) for word in words])


def snapshot(directory: Path) -> dict[str, bytes | None]:
    """Every path below ``directory``, hidden ones too, with what is in it."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }
