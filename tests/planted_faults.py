"""Faults of converters, planted into the weights of a Hugging Face checkpoint.

Each takes arrays by name and gives those of a converter that went wrong, with the tensors that it
spoilt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array

Arrays = dict[str, Array]

CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "vocab_size": 131,
    "hidden_size": 20,
    "intermediate_size": 11,
    "num_hidden_layers": 12,
    "layer_types": ["sliding_attention"] * 11 + ["full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 7,
    "global_head_dim": 13,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 9,
    "tie_word_embeddings": True,
}
"""A model in which all of them can be planted."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        spoil: Makes the wrong arrays.
        names: The tensors that are wrong.
        told: What a diff says of the first of them.
    """

    spoil: Callable[[Arrays], Arrays]
    names: tuple[str, ...]
    told: str


def _exchanged(one: str, other: str) -> Callable[[Arrays], Arrays]:
    def spoil(arrays: Arrays) -> Arrays:
        return {**arrays, one: arrays[other], other: arrays[one]}

    return spoil


def _changed(name: str, change: Callable[[Array], Array]) -> Callable[[Arrays], Arrays]:
    def spoil(arrays: Arrays) -> Arrays:
        changed = change(arrays[name].astype(np.float64)).astype(arrays[name].dtype)
        return {**arrays, name: changed}

    return spoil


def _layers_exchanged(one: int, other: int) -> Callable[[Arrays], Arrays]:
    def renamed(name: str) -> str:
        for i, j in ((one, other), (other, one)):
            if f"layers.{i}." in name:
                return name.replace(f"layers.{i}.", f"layers.{j}.")
        return name

    return lambda arrays: {name: arrays[renamed(name)] for name in arrays}


def _gate_up_swapped(experts: Array) -> Array:
    """(e, 2 m, d): expert 3 with its halves exchanged."""
    swapped = experts.copy()
    swapped[3] = np.roll(experts[3], experts.shape[1] // 2, axis=0)
    return swapped


_KEY, _VALUE = (f"model.layers.4.self_attn.{x}_proj.weight" for x in "kv")
_NORM = "model.layers.7.pre_feedforward_layernorm.weight"
_QUERY = "model.layers.5.self_attn.q_proj.weight"
_EXPERTS = "model.layers.6.experts.gate_up_proj"
_EMBEDDING = "model.embed_tokens.weight"
_SCALAR = "model.layers.3.layer_scalar"

FAULTS = {
    "k and v swapped in one layer": Fault(
        _exchanged(_KEY, _VALUE), (_KEY, _VALUE), f"holds what the first has as {_VALUE}"
    ),
    "one norm off by 1": Fault(_changed(_NORM, lambda w: w + 1), (_NORM,), "off by +1"),
    "query scale folded in": Fault(
        _changed(_QUERY, lambda w: w / 4), (_QUERY,), "every value is multiplied by 0.25"
    ),
    "layers 10 and 2 swapped": Fault(
        _layers_exchanged(10, 2),
        ("model.layers.10.self_attn.q_proj.weight", "model.layers.2.self_attn.q_proj.weight"),
        "holds what the first has as model.layers.2.self_attn.q_proj.weight",
    ),
    "gate and up swapped in one expert": Fault(
        _changed(_EXPERTS, _gate_up_swapped),
        (_EXPERTS,),
        "row [3, 0] is the first's [3, 9]",
    ),
    "vocabulary rows shifted by 64": Fault(
        _changed(_EMBEDDING, lambda w: np.roll(w, 64, axis=0)),
        (_EMBEDDING,),
        "131 of 131 rows hold another row of the first, 67 by -64 and 64 by +67, around the end: "
        "row [0] is the first's [67]",
    ),
    "layer_scalar 1.0": Fault(_changed(_SCALAR, np.ones_like), (_SCALAR,), "every value is 1"),
}
