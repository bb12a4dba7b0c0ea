"""Sizes in config.json, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.stacking import MOST_LAYERS


def positive(values: Mapping[str, Any], key: str) -> int:
    """The positive whole number under ``key``.

    Raises:
        ConfigError: If it is anything else.
    """
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"config.json: {key} is {value!r}, expected a positive whole number")
    return value


def layer_count(values: Mapping[str, Any]) -> int:
    """``num_hidden_layers``.

    Raises:
        ConfigError: If it is not a positive number, or a senseless one.
    """
    count = positive(values, "num_hidden_layers")
    if count > MOST_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers is {count}, more than {MOST_LAYERS}")
    return count


def quotient(values: Mapping[str, Any], key: str, by: str) -> int:
    """The size under ``key`` divided by that under ``by``.

    Raises:
        ConfigError: If there is a remainder.
    """
    whole, part = positive(values, key), positive(values, by)
    if whole % part:
        raise ConfigError(f"config.json: {key} is {whole}, expected a multiple of {by}, {part}")
    return whole // part
