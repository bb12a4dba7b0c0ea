"""What two config.json, or other small JSON files, say otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WRITER = ("transformers_version", "_name_or_path")
"""Keys that say who wrote a file, not what the model is."""

_UNTOLD = (*_WRITER, "dtype", "torch_dtype", "use_cache")
"""Keys that two checkpoints of one model may differ in."""

Differences = dict[str, list[Any]]
"""A dotted key to the one's value and the other's."""

ABSENT = object()
"""The value of a key that is not there, where null is another."""


def config_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Differences:
    """Keys of config.json, dotted, whose values differ; nothing where one has no config.

    A key that is not there counts as null.
    """
    return _differences(_flat(a), _flat(b), None, _UNTOLD) if a and b else {}


def json_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Differences:
    """Every key of two JSON objects whose values differ, but those of the writer.

    The value of one that is not there is `ABSENT`.
    """
    return _differences(_flat(expected), _flat(found), ABSENT, _WRITER)


def model_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Differences:
    """What two config.json say otherwise of a model, whichever defaults they spell out.

    Where one has keys that the other lacks, both are read by transformers, if it is there: it
    fills in the defaults, and brings the old spelling of RoPE to the new one.

    Args:
        expected: As parsed.
        found: As parsed.
    """
    plain = json_differences(expected, found)
    if not any(value is ABSENT for pair in plain.values() for value in pair):
        return plain
    one, other = _filled(expected), _filled(found)
    return json_differences(one, other) if one and other else plain


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested objects by dotted keys; the dtype by its later name."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{'dtype' if key == 'torch_dtype' else key}"] = value
    return found


def _differences(
    one: Mapping[str, Any], other: Mapping[str, Any], absent: Any, untold: tuple[str, ...]
) -> Differences:
    found = {key: [one.get(key, absent), other.get(key, absent)] for key in sorted({*one, *other})}
    return {
        key: pair
        for key, pair in found.items()
        if not same_json(*pair) and key.rpartition(".")[2] not in untold
    }


def same_json(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_json, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _filled(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """``config`` with the defaults of transformers; None if that is not to be had."""
    try:
        from transformers import CONFIG_MAPPING

        filled = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    except Exception:  # not installed, or a config that it refuses: any error of its own
        return None
    return dict(filled)
