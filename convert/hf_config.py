"""config.json of the output: the base's, with only what the conversion changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NESTED = ("text_config", "vision_config", "audio_config")


def updated(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """``config`` for weights stored in ``dtype``, no longer quantised.

    Args:
        config: The base's config.json. Its key for the dtype is kept, ``torch_dtype`` (until
            transformers 4.55) or ``dtype``; unknown keys are carried.
        dtype: As config.json spells it, such as ``bfloat16``.

    Returns:
        A new config: ``dtype`` set at the top and wherever a nested config names one, and
        ``quantization_config`` gone from all of them.
    """
    changed = _with_dtype(config, dtype, always=True)
    for key in _NESTED:
        if isinstance(config.get(key), Mapping):
            changed[key] = _with_dtype(config[key], dtype, always=False)
    return changed


def _with_dtype(config: Mapping[str, Any], dtype: str, *, always: bool) -> dict[str, Any]:
    changed = {key: value for key, value in config.items() if key != "quantization_config"}
    keys = [key for key in ("torch_dtype", "dtype") if key in changed]
    for key in keys or (["dtype"] if always else []):
        changed[key] = dtype
    return changed
