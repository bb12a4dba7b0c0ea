"""Rotary position embeddings (RoPE): what config.json says of them, in its old and its new form.

Old (transformers before 5): ``rope_theta`` with ``rope_scaling``, and ``rope_local_base_freq`` for
Gemma 3's local layers, which are not scaled. New: ``rope_parameters``, for Gemma 3 and 4 one set
a layer type. Keys left out take the family's defaults. No layout stores RoPE with the weights, so
a config that loses them loads well and answers badly beyond the first tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.tensor import Array

LAYER_TYPES = ("full_attention", "sliding_attention")
_OLD_KEY = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
_OWN_LOCAL = {"rope_local_base_freq", "rope_parameters"}  # a family with one of these by default
_USUAL_THETA = 10000.0  # what transformers assumes of a model_type that has no default of its own
ROPE_KEYS = ("rope_parameters", "rope_scaling", *_OLD_KEY.values())


@dataclass(frozen=True)
class Rope:
    """RoPE of one type of layer.

    Attributes:
        theta: The base; wavelengths run from 2 pi to 2 pi theta.
        scaling: ``default``, ``linear`` or ``proportional``, as ``rope_type`` spells it.
        factor: What positions are divided by, except with ``default``.
        partial: Share of the head's dimensions that is rotated, except with ``default``.
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    partial: float = 1.0


def read_rope(text: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Rope]:
    """The RoPE of each layer type.

    Args:
        text: The text part of config.json.
        defaults: What the family assumes of missing keys, in either form. A family whose local
            layers have a RoPE of their own says so here.

    Returns:
        ``full_attention`` and ``sliding_attention`` to their settings.

    Raises:
        ConfigError: If a number is none, or ``rope_parameters`` has the shape of another family.
    """
    given = {key: text[key] for key in ROPE_KEYS if text.get(key) is not None}
    values = {**defaults, **given}
    parameters = _mapping(values, "rope_parameters")
    scaling = _mapping(values, "rope_scaling")
    nested = bool(_OWN_LOCAL & defaults.keys())
    if parameters and nested != any(kind in parameters for kind in LAYER_TYPES):
        expected = " and ".join(LAYER_TYPES) if nested else "rope_type, rope_theta, ..."
        raise ConfigError(
            f"config.json: rope_parameters has {', '.join(parameters)}, expected {expected}",
            "the model_type has the other form",
        )
    if not nested:
        rope = _rope(scaling or parameters, values.get("rope_theta", _USUAL_THETA))
        return dict.fromkeys(LAYER_TYPES, rope)
    fallback = defaults.get("rope_parameters", {})
    sections = {kind: _mapping(parameters, kind) or fallback.get(kind, {}) for kind in LAYER_TYPES}
    sections["full_attention"] = {**sections["full_attention"], **_renamed(scaling)}
    return {
        kind: _rope(section, values.get(_OLD_KEY[kind], fallback.get(kind, {}).get("rope_theta")))
        for kind, section in sections.items()
    }


def with_rope_type(
    config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """``config`` with ``rope_type`` where ``rope_scaling`` has the older key ``type`` alone.

    Of a family whose local layers have a RoPE of their own, transformers 4.57 reads either key,
    5.0.0 to 5.12.1 ``rope_type`` alone: they put the settings over ``{"rope_type": "default"}``.

    Args:
        config: config.json.
        defaults: The family's; see `read_rope`.

    Returns:
        The config, and what a user should know of it.
    """
    text = config.get("text_config", config)
    scaling = text.get("rope_scaling") if isinstance(text, Mapping) else None
    if not _OWN_LOCAL & defaults.keys() or not isinstance(scaling, Mapping):
        return config, ()
    if scaling.get("type") is None or scaling.get("rope_type") is not None:
        return config, ()
    note = (
        f"config.json: rope_scaling says {scaling['type']} by the key type, which transformers 5 "
        "does not read (4.57 does); it is taken as meant, and a config.json that is written says "
        "rope_type too"
    )
    text = {**text, "rope_scaling": {**scaling, "rope_type": scaling["type"]}}
    return ({**config, "text_config": text} if "text_config" in config else text), (note,)


def inverse_frequencies(rope: Rope, head_dim: int) -> Array:
    """Angle of a head's pairs of dimensions per position, as transformers 5.12.1 computes it.

    Args:
        rope: The settings.
        head_dim: h.

    Returns:
        float64, (h / 2), or fewer where ``linear`` rotates a part of the head; zero for the pairs
        that ``proportional`` leaves alone.

    Raises:
        ConfigError: If the scaling is none of the three.
    """
    if rope.scaling == "default":
        return _geometric(rope.theta, head_dim, head_dim)
    if rope.scaling == "linear":
        rotated = int(head_dim * rope.partial)
        return _geometric(rope.theta, rotated, rotated) / rope.factor
    if rope.scaling == "proportional":
        angles = int(rope.partial * head_dim // 2)
        frequencies = np.zeros(head_dim // 2)
        frequencies[:angles] = _geometric(rope.theta, 2 * angles, head_dim)
        return frequencies / rope.factor
    raise ConfigError(
        f"config.json: rope_type {rope.scaling!r} is not known here",
        "known: default, linear, proportional",
    )


def _geometric(theta: float, stop: int, period: int) -> Array:
    frequencies: Array = theta ** -(np.arange(0, stop, 2, dtype=np.float64) / period)
    return frequencies


def _rope(section: Mapping[str, Any], theta: Any) -> Rope:
    section = {"rope_theta": theta, **_renamed(section)}
    scaling = section.get("rope_type", "default")
    if not isinstance(scaling, str):
        raise ConfigError(f"config.json: rope_type is {scaling!r}, expected a word")
    partial = _positive(section, "partial_rotary_factor", 1.0)
    if partial > 1:
        raise ConfigError(f"config.json: RoPE's partial_rotary_factor is {partial:g}, above 1")
    return Rope(
        theta=_positive(section, "rope_theta"),
        scaling=scaling,
        factor=_positive(section, "factor", None if scaling == "linear" else 1.0),
        partial=partial,
    )


def _renamed(section: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, and with ``rope_type`` where the oldest configs say ``type``."""
    found = {key: value for key, value in section.items() if value is not None}
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    return found


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {key} is {value!r}, expected an object")
    return value


def _positive(section: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = section.get(key, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"config.json: RoPE's {key} is {value!r}, expected a positive number")
    return float(value)
