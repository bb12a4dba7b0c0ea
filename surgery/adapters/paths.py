"""The modules of a PEFT adapter under the paths of the model that it was trained on.

`Adapter` names weights apart from any wrapper; an adapter that is written again for the same base
gets its own paths back, so no config.json is needed to tell how the base is wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.layouts import HF
from gemma_convert.convert.model import text_config
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.peft_keys import read_key, weight_name


def original_paths(checkpoint: Checkpoint) -> dict[str, str]:
    """Weight name to the weight's path, as the keys of a PEFT adapter have it."""
    found: dict[str, str] = {}
    for text in checkpoint:
        key = read_key(text)
        if key.factor == "original":
            continue
        path = key.module if key.factor == "saved" else f"{key.module}.weight"
        found.setdefault(weight_name(path), path)
    return found


def paths_of(
    checkpoints: Sequence[Checkpoint], names: Iterable[str], config: Mapping[str, Any] | None
) -> dict[str, str]:
    """Weight names to paths: as in the PEFT adapters, else as the base's model has them.

    Args:
        checkpoints: Of the adapters, PEFT's or others.
        names: The weights.
        config: The base's config.json: a nested one names its text model as transformers does.
    """
    nested = config is not None and text_config(config) is not config
    prefix = "model.language_model." if nested else HF.default_prefix
    found = {name: prefix + name for name in names}
    for checkpoint in reversed(checkpoints):
        if "adapter_config" in checkpoint.metadata:
            found |= original_paths(checkpoint)
    return found


def renamed(adapter: Adapter, paths: Mapping[str, str]) -> Adapter:
    """``adapter`` with its weights under ``paths``; those that it does not name stay."""
    return replace(
        adapter,
        pairs={paths.get(name, name): pair for name, pair in adapter.pairs.items()},
        scales={paths.get(name, name): scale for name, scale in adapter.scales.items()},
        saved={paths.get(name, name): tensor for name, tensor in adapter.saved.items()},
        copies=frozenset(paths.get(name, name) for name in adapter.copies),
    )
