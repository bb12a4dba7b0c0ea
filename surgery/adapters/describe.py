"""An adapter told to people and machines: ranks, the scale really applied, modules, norms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.surgery.adapters.adapter import Adapter, Pair
from gemma_convert.surgery.adapters.peft import read_peft
from gemma_convert.surgery.adapters.qwix import ALPHAS, check_rank, read_qwix, stored_alpha


def read(
    checkpoint: Checkpoint,
    pairs: Mapping[str, Pair],
    alpha: float | None,
    problems: list[str],
) -> Adapter | None:
    """The adapter that ``checkpoint`` holds, or None where it is not understood.

    Args:
        checkpoint: As opened.
        pairs: The Qwix factors in it.
        alpha: As given by the user.
        problems: Told what is wrong with the adapter.
    """
    try:
        if not pairs:
            return read_peft(checkpoint)
        check_rank(checkpoint.metadata, pairs)
        known = alpha is not None or alpha_differs(checkpoint)
        if stored_alpha(checkpoint.metadata) is None and not known:
            return None  # not a fault of the checkpoint: Tunix does not store it
        return read_qwix(pairs, checkpoint.metadata, alpha, checkpoint.source)
    except AdapterError as error:
        problems.append(str(error))
        return None


def describe(adapter: Adapter) -> dict[str, Any]:
    """What an adapter consists of, as plain data."""
    return {
        **describe_pairs(adapter.kind, adapter.pairs),
        "scales": sorted(set(adapter.scales.values())),
        "scale_by_module": dict(adapter.scales),
        "replaced": list(adapter.saved),
    }


def describe_pairs(kind: str, pairs: Mapping[str, Pair]) -> dict[str, Any]:
    """What can be said of pairs whose scale is not known."""
    return {
        "kind": kind,
        "pairs": len(pairs),
        "ranks": dict(Counter(str(pair.rank) for pair in pairs.values())),
        "rank_by_module": {name: pair.rank for name, pair in pairs.items()},
        "modules": dict(Counter(module_of(name) for name in pairs)),
    }


def module_of(name: str) -> str:
    """What a weight is, whatever its layer: ``self_attn.q_proj`` or ``attn.q_einsum``."""
    words = [word for word in re.split("[./]", name) if not word.isdigit()]
    if words[-1] in ("weight", "w", "kernel"):
        words = words[:-1]
    return ".".join(words[-2:])


def alpha_differs(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint says an alpha of single modules."""
    lora = (checkpoint.metadata.get("custom_metadata") or {}).get("lora")
    pattern = checkpoint.metadata.get("adapter_config", {}).get("alpha_pattern")
    return bool(pattern) or (isinstance(lora, Mapping) and ALPHAS in lora)
