"""An adapter as the tensors and the adapter_config.json of a PEFT directory."""

from __future__ import annotations

from typing import Any

from gemma_convert.convert.tensor import Tensor
from gemma_convert.surgery.adapters.adapter import Adapter

_PREFIX = "base_model.model."


def peft_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """PEFT's names and tensors of an adapter in PEFT's form."""
    found: dict[str, Tensor] = {}
    for name, pair in adapter.pairs.items():
        stem = _PREFIX + module_path(name)
        found[f"{stem}.lora_A.weight"] = pair.a
        found[f"{stem}.lora_B.weight"] = pair.b
        if pair.magnitude is not None:
            found[f"{stem}.lora_magnitude_vector"] = pair.magnitude
    return found | {_PREFIX + name: tensor for name, tensor in adapter.saved.items()}


def peft_config(
    adapter: Adapter, base_id: str | None = None, revision: str | None = None
) -> dict[str, Any]:
    """The adapter_config.json of an adapter in PEFT's form.

    ``target_modules`` are full paths, so that no module of a tower is hit. ``r`` is the largest
    rank; modules of another rank or alpha are in the patterns, by their full path too.

    Args:
        adapter: Spelled as the model that will load it spells its modules.
        base_id: Hub id of the base; PEFT needs none to load onto a model that is there.
        revision: Of ``base_id``.
    """
    modules = {module_path(name): name for name in adapter.pairs}
    ranks = {module: adapter.pairs[name].rank for module, name in modules.items()}
    alphas = {m: alpha_for(adapter.scales[name], ranks[m]) for m, name in modules.items()}
    rank = max(ranks.values())
    alpha = next(alphas[module] for module, r in ranks.items() if r == rank)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_id,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {module: r for module, r in ranks.items() if r != rank},
        "alpha_pattern": {module: a for module, a in alphas.items() if a != alpha},
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": sorted(map(module_path, adapter.copies)) or None,
        "use_dora": any(pair.magnitude is not None for pair in adapter.pairs.values()),
        "use_rslora": False,
        **({"ensure_weight_tying": True} if adapter.ties_head else {}),
    }


def one_scale(adapter: Adapter) -> bool:
    """Whether all modules have one scale, which is all that vLLM applies."""
    return len(set(adapter.scales.values())) == 1


def module_path(name: str) -> str:
    """The module of a weight."""
    return name.removesuffix(".weight")


def alpha_for(scale: float, rank: int) -> float:
    """The alpha with alpha / ``rank`` = ``scale``; a whole number as int, as PEFT writes it."""
    alpha = scale * rank
    near = round(alpha, 9)
    if near / rank == scale:
        alpha = near
    return int(alpha) if alpha == int(alpha) else alpha
