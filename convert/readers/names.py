"""The order of tensor names: numbers as numbers, so layer 2 comes before layer 10."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

_DIGITS = re.compile(r"([0-9]+)")
_Value = TypeVar("_Value")


def natural(name: str) -> tuple[tuple[object, ...], str]:
    """A sort key under which ``layers.2`` comes before ``layers.10``.

    Runs of digits compare by length, then by digits, once leading zeros are gone: the same order
    as int(), without its limit on the number of digits. The name itself breaks ties.
    """
    parts = _DIGITS.split(name)
    numbers = [digits.lstrip("0") for digits in parts[1::2]]
    keys: list[object] = list(parts)
    keys[1::2] = [(len(digits), digits) for digits in numbers]
    return tuple(keys), name


def in_natural_order(tensors: Mapping[str, _Value]) -> dict[str, _Value]:
    """The same mapping, its names in natural order."""
    return {name: tensors[name] for name in sorted(tensors, key=natural)}
