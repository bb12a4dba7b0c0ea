"""Independent judges of a merge: the mathematics written out with einsum, and transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

# A . B in the axis order of Hugging Face's (out, in) weights; s is 0 for K and 1 for V.
DELTAS = {
    "attn.q_einsum.w": ("dr,rnh->nhd", ("self_attn.q_proj",)),
    "attn.kv_einsum.w": ("dr,rskh->skhd", ("self_attn.k_proj", "self_attn.v_proj")),
    "attn.attn_vec_einsum.w": ("nhr,rd->dnh", ("self_attn.o_proj",)),
    "mlp.gate_proj.kernel": ("dr,rf->fd", ("mlp.gate_proj",)),
    "mlp.up_proj.kernel": ("dr,rf->fd", ("mlp.up_proj",)),
    "mlp.down_proj.kernel": ("fr,rd->df", ("mlp.down_proj",)),
}


def merge(
    base: Mapping[str, Array], factors: Mapping[str, Array], alpha: float
) -> dict[str, Array]:
    """Add ``alpha / r * A.B`` to the weights, in float32."""
    merged = dict(base)
    for path in (name.removesuffix("_lora_a") for name in factors if name.endswith("_lora_a")):
        a, b = factors[f"{path}_lora_a"], factors[f"{path}_lora_b"]
        _, layer, module = path.split(".", 2)
        pattern, targets = DELTAS[module]
        delta = np.einsum(pattern, a, b) * np.float32(alpha / a.shape[-1])
        for target, part in zip(targets, np.split(delta, len(targets)), strict=True):
            name = f"model.layers.{layer}.{target}.weight"
            merged[name] = base[name] + part.reshape(base[name].shape)
    return merged


def read_weights(hf_dir: Path) -> dict[str, Array]:
    """Every tensor of a Hugging Face directory's shards, in float32."""
    from safetensors.torch import load_file

    return {
        name: tensor.float().numpy()
        for shard in sorted(hf_dir.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }


def hf_model(hf_dir: Path, weights: Mapping[str, Array] | None = None) -> Any:
    """The model in transformers, in float32, with other weights if given."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    if weights is not None:
        tensors = {name: torch.from_numpy(value) for name, value in weights.items()}
        # The output layer is the embedding and has no tensor of its own.
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])
    return model.eval()


def hf_logits(model: Any, token_ids: list[int]) -> Array:
    """Its logits ``(tokens, vocabulary)`` in float32, without a KV cache."""
    import torch

    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), use_cache=False)
    return np.asarray(output.logits[0], np.float32)


def hf_greedy(model: Any, token_ids: list[int], count: int) -> list[int]:
    """The next tokens by transformers' greedy search, at most ``count``."""
    import torch

    ids = torch.tensor([token_ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return [int(token) for token in output[0, len(token_ids) :]]
