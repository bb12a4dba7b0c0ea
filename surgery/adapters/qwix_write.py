"""An adapter as the tensors of a Tunix checkpoint, and what it takes to restore them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gemma_convert.convert.tensor import Tensor
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.peft_write import alpha_for
from gemma_convert.surgery.adapters.qwix import ALPHAS


def qwix_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Tunix's names and tensors of an adapter in Qwix's form."""
    found: dict[str, Tensor] = {}
    for name, pair in adapter.pairs.items():
        found[f"{name}_lora_a"] = pair.a
        found[f"{name}_lora_b"] = pair.b
    return found


def qwix_metadata(adapter: Adapter) -> dict[str, Any]:
    """Custom metadata: alpha and rank, and the rules under which Qwix makes such factors.

    ``rules`` are the arguments of ``qwix.LoraRule``; more than one where ranks or scales differ.
    Those of a QLoRA run say how it quantised the base.

    Raises:
        AdapterError: If it quantised modules in different ways.
    """
    rules = qwix_rules(adapter)
    lora: dict[str, Any] = {"rules": rules, **adapter.trained_on.base_dtype()}
    if len({rule["rank"] for rule in rules}) == 1:
        lora["rank"] = rules[0]["rank"]
    if len({rule["alpha"] for rule in rules}) == 1:
        lora["alpha"] = rules[0]["alpha"]
    else:
        lora[ALPHAS] = {
            name: alpha_for(adapter.scales[name], pair.rank) for name, pair in adapter.pairs.items()
        }
    return {"lora": lora}


def qwix_rules(adapter: Adapter) -> list[dict[str, Any]]:
    """Qwix's rules, one for each rank and alpha that occur; ``module_path`` is a full match."""
    modules: dict[tuple[int, float], list[str]] = {}
    for name, pair in adapter.pairs.items():
        key = (pair.rank, alpha_for(adapter.scales[name], pair.rank))
        modules.setdefault(key, []).append(name.rpartition(".")[0].replace(".", "/"))
    quantised = adapter.trained_on.arguments()
    return [
        {"module_path": _pattern(names), "rank": rank, "alpha": alpha, **quantised}
        for (rank, alpha), names in modules.items()
    ]


def _pattern(modules: list[str]) -> str:
    """A regular expression of exactly ``modules``: layers with the same modules told together."""
    layers: dict[str, list[str]] = {}
    others: list[str] = []
    for module in modules:
        found = re.fullmatch(r"layers/(\d+)/(.+)", module)
        if found is None:
            others.append(module)
        else:
            layers.setdefault(found[1], []).append(found[2])
    same: dict[tuple[str, ...], list[str]] = {}
    for layer, names in layers.items():
        same.setdefault(tuple(names), []).append(layer)
    return "|".join([*_spelled(same), *others])


def _spelled(same: Mapping[tuple[str, ...], list[str]]) -> list[str]:
    return [f"layers/({'|'.join(n)})/({'|'.join(names)})" for names, n in same.items()]
