"""Inputs of ``gemma-convert demo``, and its own check of the result.

The check is written out by hand in float64, module by module, and uses neither the rows nor the
merge that it checks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gemma_convert.convert.layouts import HF, TUNIX, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.random_model import random_factors, random_model
from gemma_convert.convert.readers import open_orbax, open_safetensors
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.writers.hf import write_hf
from gemma_convert.convert.writers.orbax import write_orbax

ALPHA = 6.0
RANK = 3
SHARD_BYTES = 100_000
PREFIX = "model.language_model."

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "vocab_size": 509,
        "hidden_size": 60,
        "intermediate_size": 88,
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_global_key_value_heads": 2,
        "head_dim": 14,
        "global_head_dim": 22,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
}
"""A Gemma 4 as the 31B is built, with dimensions that no mistake of order survives."""

MODULES = {
    "self_attn.q_proj": ("attn.q_einsum.w", "dr,rnh->nhd"),
    "self_attn.o_proj": ("attn.attn_vec_einsum.w", "nhr,rd->dnh"),
    "mlp.gate_proj": ("mlp.gate_proj.kernel", "dr,rf->fd"),
    "mlp.up_proj": ("mlp.up_proj.kernel", "dr,rf->fd"),
    "mlp.down_proj": ("mlp.down_proj.kernel", "fr,rd->df"),
}
LOCAL = {
    "self_attn.k_proj": ("attn.kv_einsum.w", "dr,rskh->skhd"),
    "self_attn.v_proj": ("attn.kv_einsum.w", "dr,rskh->skhd"),
}
GLOBAL = {"self_attn.k_proj": ("attn.k_einsum.w", "dr,rkh->khd")}
"""HF module to Tunix module and the einsum of its delta: in HF's axis order, k and v stacked."""


def make_inputs(directory: Path) -> None:
    """Make ``directory/base`` (Hugging Face) and ``directory/run`` (Orbax, LoRA factors)."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    base = random_model(CONFIG, Spelling(HF, PREFIX), bfloat16)
    (directory / "base").mkdir()
    write_hf(base, directory / "base", max_shard_bytes=SHARD_BYTES, progress=lambda _: None)
    model = read_model(CONFIG, families())
    factors = random_factors(model, Spelling(TUNIX, ""), RANK, bfloat16)
    (directory / "run").mkdir()
    write_orbax(factors, directory / "run")


def check_merge(directory: Path) -> tuple[int, int]:
    """Compare ``directory/merged`` with values computed anew in float64.

    Returns:
        How many merged weights are not the float64 value rounded to bfloat16, and how many
        weights were compared.
    """
    base = open_safetensors(directory / "base")
    merged = open_safetensors(directory / "merged")
    run = open_orbax(directory / "run")
    wrong = compared = 0
    for layer, kind in enumerate(CONFIG["text_config"]["layer_types"]):
        own = GLOBAL if kind == "full_attention" else LOCAL
        for module, (tunix, einsum) in {**MODULES, **own}.items():
            name = f"{PREFIX}layers.{layer}.{module}.weight"
            a, b = (_wide(run[f"layers.{layer}.{tunix}_lora_{side}"].numpy()) for side in "ab")
            delta = ALPHA / RANK * np.einsum(einsum, a, b)
            if "s" in einsum:
                delta = delta[["self_attn.k_proj", "self_attn.v_proj"].index(module)]
            weight = _wide(base[name].numpy())
            expected = (weight + delta.reshape(weight.shape)).astype(ml_dtypes.bfloat16)
            wrong += int(np.count_nonzero(expected != merged[name].numpy()))
            compared += expected.size
    return wrong, compared


def _wide(array: Array) -> Array:
    return array.astype(np.float64)
