"""What a LoRA merge must give, written out by hand in float64 and apart from the package.

The einsums are those under which Qwix and Tunix contract the factors; the transposes are those
that take a Hugging Face weight (out, in) to Tunix's array, undone. Axis letters: d hidden size,
f feed-forward size, n query heads, k key/value heads, h head dimension, c key or value, s query,
key or value, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from gemma_convert.convert.tensor import Array

EINSUMS = {
    "attn.q_einsum.w": "dr,rnh->ndh",
    "attn.kv_einsum.w": "dr,rckh->ckdh",
    "attn.qkv_einsum.w": "dr,rsnh->sndh",
    "attn.k_einsum.w": "dr,rkh->kdh",
    "attn.attn_vec_einsum.w": "nhr,rd->nhd",
    "mlp.gate_proj.kernel": "dr,rf->df",
    "mlp.up_proj.kernel": "dr,rf->df",
    "mlp.down_proj.kernel": "fr,rd->fd",
}
"""Tunix module to the einsum of A and B that gives the delta in the weight's own axis order."""


def heads_last(array: Array) -> Array:
    """(n, d, h) as Tunix stores a projection, to (n h, d) as Hugging Face does."""
    return array.transpose(0, 2, 1).reshape(-1, array.shape[1])


def heads_first(array: Array) -> Array:
    """(n, h, d) as Tunix stores the output projection, to (d, n h)."""
    return array.transpose(2, 0, 1).reshape(array.shape[2], -1)


HF_MODULES: dict[str, dict[str, Callable[[Array], Array]]] = {
    "attn.q_einsum.w": {"self_attn.q_proj": heads_last},
    "attn.kv_einsum.w": {
        "self_attn.k_proj": lambda array: heads_last(array[0]),
        "self_attn.v_proj": lambda array: heads_last(array[1]),
    },
    "attn.qkv_einsum.w": {
        "self_attn.q_proj": lambda array: heads_last(array[0]),
        "self_attn.k_proj": lambda array: heads_last(array[1]),
        "self_attn.v_proj": lambda array: heads_last(array[2]),
    },
    "attn.k_einsum.w": {"self_attn.k_proj": heads_last},
    "attn.attn_vec_einsum.w": {"self_attn.o_proj": heads_first},
    "mlp.gate_proj.kernel": {"mlp.gate_proj": np.transpose},
    "mlp.up_proj.kernel": {"mlp.up_proj": np.transpose},
    "mlp.down_proj.kernel": {"mlp.down_proj": np.transpose},
}
"""Tunix module to the Hugging Face modules that it holds, and each one's share of its array."""


def deltas(
    factors: Mapping[str, Array], alpha: float, *, absolute: bool = False
) -> dict[str, Array]:
    """Hugging Face name without prefix to what the adapter adds to it, float64.

    Args:
        factors: As in a Tunix checkpoint, ``layers.<i>.<module>_lora_a`` and ``_b``.
        alpha: LoRA alpha; the rank is the factors'.
        absolute: Multiply the factors' absolute values: what rounding errors are relative to.
    """
    found: dict[str, Array] = {}
    for name in factors:
        stem, mark, _ = name.partition("_lora_a")
        if not mark:
            continue
        a, b = (factors[f"{stem}_lora_{side}"].astype(np.float64) for side in "ab")
        if absolute:
            a, b = np.abs(a), np.abs(b)
        _, layer, module = stem.split(".", 2)
        delta = alpha / a.shape[-1] * np.einsum(EINSUMS[module], a, b)
        for hf_module, share in HF_MODULES[module].items():
            found[f"layers.{layer}.{hf_module}.weight"] = share(delta)
    return found


def merged(
    base: Mapping[str, Array], prefix: str, factors: Mapping[str, Array], alpha: float
) -> dict[str, Array]:
    """Every tensor of ``base`` with its delta added, float64; those without one as they are."""
    added = deltas(factors, alpha)
    assert all(prefix + name in base for name in added)
    return {
        name: array.astype(np.float64) + added[name.removeprefix(prefix)]
        if name.removeprefix(prefix) in added
        else array
        for name, array in base.items()
    }


def rounded_to_bfloat16(values: Array) -> Array:
    """float64 rounded once, to 8 significant bits, ties to even. For normal numbers."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8).astype(ml_dtypes.bfloat16)
