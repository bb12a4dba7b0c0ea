"""MaxText's trees written out in numpy, apart from the package.

From MaxText git e591f30: ``checkpoint_conversion/utils/param_mapping.py`` for Gemma 2, 3 and 4 and
``standalone_scripts/convert_gemma_chkpt.py`` for Gemma 1; values in float32. One thing differs on
purpose: queries are scaled by ``query_pre_attn_scalar ** -0.5`` (as ``convert_gemma2_chkpt.py``
does), not by the head dimension's root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from gemma_convert.convert.tensor import Array

PATTERN = {"gemma": 1, "gemma2": 2, "gemma3": 6, "gemma4": 6}
"""Layers of a block, as MaxText has them whatever config.json says."""

_NORMS = {
    "pre_self_attention_norm": "input_layernorm",
    "post_self_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_NORMS = {
    f"mlp/{name}": name
    for name in (
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
    )
}


def maxtext_tree(
    weights: Mapping[str, Array], prefix: str, config: Mapping[str, Any], *, scanned: bool
) -> dict[str, Array]:
    """MaxText's arrays of Hugging Face's float32 ``weights``, by names without a prefix."""
    generation = config["model_type"].split("_")[0]
    count, width = config["num_hidden_layers"], config["hidden_size"]
    offset = np.float32(0 if generation == "gemma4" else 1)
    root = np.float32(width**0.5)
    if generation == "gemma3":
        root = np.float32(ml_dtypes.bfloat16(root))
    tree = {
        "token_embedder/embedding": weights[prefix + "embed_tokens.weight"] * root,
        "decoder/decoder_norm/scale": weights[prefix + "norm.weight"] + offset,
    }
    layers = []
    for i in range(count):
        start = f"{prefix}layers.{i}."
        own = {n.removeprefix(start): w for n, w in weights.items() if n.startswith(start)}
        layers.append(_layer(own, generation, config, i, offset))
    if config.get("hidden_size_per_layer_input"):
        tree |= _per_layer_embedder(weights, prefix)
    place = _scanned if scanned else _unscanned
    tree |= place(layers, generation, count)
    return tree


def _layer(
    own: Mapping[str, Array], generation: str, config: Mapping[str, Any], i: int, offset: Array
) -> dict[str, Array]:
    """One layer's arrays by their names inside the layer."""
    full = config["layer_types"][i] == "full_attention"
    h = config["global_head_dim"] if full and generation == "gemma4" else config["head_dim"]
    made: dict[str, Array] = {}
    for name, hf in {"query": "q_proj", "key": "k_proj", "value": "v_proj"}.items():
        if f"self_attn.{hf}.weight" in own:
            weight = own[f"self_attn.{hf}.weight"]
            made[f"self_attention/{name}/kernel"] = weight.T.reshape(weight.shape[1], -1, h)
    if generation in ("gemma", "gemma2"):
        scalar = config.get("query_pre_attn_scalar", config["head_dim"])
        made["self_attention/query/kernel"] = made["self_attention/query/kernel"] * np.float32(
            scalar**-0.5
        )
    o = own["self_attn.o_proj.weight"]
    made["self_attention/out/kernel"] = o.T.reshape(-1, h, o.shape[0])
    for name in ("query_norm", "key_norm"):
        hf = f"self_attn.{name[0]}_norm.weight"
        if hf in own:
            made[f"self_attention/{name}/scale"] = own[hf] + offset
    norms = _NORMS
    if generation == "gemma":
        norms = {"pre_self_attention_norm": "input_layernorm"}
        norms |= {"pre_ffw_norm": "post_attention_layernorm"}
    for name, hf in (norms | (_EXPERT_NORMS if "router.scale" in own else {})).items():
        made[f"{name}/scale"] = own[f"{hf}.weight"] + offset
    made |= _experts(own) if "router.scale" in own else _mlp(own, "mlp")
    for name in ("per_layer_input_gate", "per_layer_projection"):
        if f"{name}.weight" in own:
            made[f"{name}/kernel"] = own[f"{name}.weight"].T
    if "layer_scalar" in own:
        made["layer_scalar"] = own["layer_scalar"]
    if "post_per_layer_input_norm.weight" in own:
        made["post_per_layer_input_norm/scale"] = own["post_per_layer_input_norm.weight"]
    return made


def _mlp(own: Mapping[str, Array], where: str) -> dict[str, Array]:
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    return {f"{where}/{n}/kernel": own[f"mlp.{hf}.weight"].T for n, hf in names.items()}


def _experts(own: Mapping[str, Array]) -> dict[str, Array]:
    routed = "mlp/moe_block/MoeBlock_0"
    half = own["experts.gate_up_proj"].shape[1] // 2
    return _mlp(own, "mlp/moe_block/shared_experts") | {
        "mlp/pre_forward_scale_2": own["router.scale"],
        f"{routed}/gate/kernel": own["router.proj.weight"].T,
        f"{routed}/per_expert_scale": own["router.per_expert_scale"],
        f"{routed}/wi_0": own["experts.gate_up_proj"][:, :half].transpose(0, 2, 1),
        f"{routed}/wi_1": own["experts.gate_up_proj"][:, half:].transpose(0, 2, 1),
        f"{routed}/wo": own["experts.down_proj"].transpose(0, 2, 1),
    }


def _per_layer_embedder(weights: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    where = "decoder/per_layer_embedder"
    return {
        f"{where}/embed_tokens_per_layer": weights[prefix + "embed_tokens_per_layer.weight"],
        f"{where}/per_layer_model_projection/kernel": weights[
            prefix + "per_layer_model_projection.weight"
        ].T,
        f"{where}/per_layer_projection_norm/scale": weights[
            prefix + "per_layer_projection_norm.weight"
        ],
    }


def _unscanned(layers: list[dict[str, Array]], generation: str, count: int) -> dict[str, Array]:
    if generation == "gemma2":
        return {
            f"decoder/layers_{i // 2}/{_paired(name, i)}": array
            for i in range(count)
            for name, array in layers[i].items()
        }
    return {f"decoder/layers_{i}/{n}": a for i in range(count) for n, a in layers[i].items()}


def _paired(name: str, i: int) -> str:
    module, _, rest = name.partition("/")
    return f"{module}_{('local', 'global')[i % 2]}/{rest}"


def _scanned(layers: list[dict[str, Array]], generation: str, count: int) -> dict[str, Array]:
    p = PATTERN[generation]
    whole = count - count % p
    groups: dict[str, list[Array]] = defaultdict(list)
    tree: dict[str, Array] = {}
    for i, layer in enumerate(layers):
        for name, array in layer.items():
            if generation == "gemma":
                groups[f"decoder/layers/{name}"].append(array)
            elif generation == "gemma2":
                groups[f"decoder/layers/{_paired(name, i)}"].append(array)
            elif i >= whole:
                tree[f"decoder/layers_remainder/layers_{i - whole}/{name}"] = array
            elif generation == "gemma3":
                groups[f"decoder/layers/layers_{i % p}/{name}"].append(array)
            elif i % p == p - 1:
                groups[f"decoder/scanned_blocks/global_layer/{name}"].append(array)
            else:
                groups[f"decoder/scanned_blocks/local_layers/{name}"].append(array)
    for name, arrays in groups.items():
        axis = min(1, arrays[0].ndim)
        array = np.stack(arrays, axis)
        if "/local_layers/" in name:  # the blocks, then the local layers of each
            shape = array.shape
            array = array.reshape(*shape[:axis], -1, p - 1, *shape[axis + 1 :])
        tree[name] = array
    return tree
