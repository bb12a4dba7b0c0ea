"""Damage done to files: to their bytes, and to the values of JSON in them. All from one seed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

TOKENS = (
    b"{}",
    b"[",
    b"null",
    b"1e999",
    b"NaN",
    b"\0",
    b"\n",
    b"\x1b[31m",
    b"\xff\xfe",
    b"\\ud800",
    b"../",
    b"-1",
    b"9" * 25,
    b"\x80\x80\x80\x80\x80\x80\x80\x80\x7f",
    b"[" * 300,
)
"""What is written into bytes."""

NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30, 10**400)

VALUES: tuple[Any, ...] = (
    *NUMBERS,
    None,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("inf"),
    float("nan"),
    "",
    "x",
    "a\nb",
    "\x1b[31mred",
    "nul\0",
    "\ud800",
    "\u202e",
    "..",
    "../../x.safetensors",
    "/etc/passwd",
    "model.safetensors",
    "٣",
    "²",
    "(a+)+$",
    "layers.1.",
    "y" * 3000,
    [],
    {},
    [[]],
    [0],
    [2**62, 2**62],
    [0, 2**62],
    [-1],
    [None],
    ["x", 3],
    {"x": 1},
    {"": {}},
)
"""What is put in the place of a value of JSON."""

Mutation = Callable[[bytes, Random], bytes]


def flip(data: bytes, random: Random) -> bytes:
    """Change up to four bytes."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def truncate(data: bytes, random: Random) -> bytes:
    """Cut the end off."""
    return data[: random.randrange(len(data) + 1)]


def splice(data: bytes, random: Random) -> bytes:
    """Put a piece of the data, or a token, somewhere else, over what is there or between it."""
    start = random.randrange(len(data) + 1)
    piece = random.choice(TOKENS)
    if data and random.random() < 0.5:
        first = random.randrange(len(data))
        piece = data[first : first + random.randint(1, 64)]
    over = random.choice((0, len(piece)))
    return data[:start] + piece + data[start + over :]


def remove(data: bytes, random: Random) -> bytes:
    """Take a piece out."""
    start = random.randrange(len(data) + 1)
    return data[:start] + data[start + random.randint(1, 64) :]


def number(data: bytes, random: Random) -> bytes:
    """Write an integer over eight bytes, most often the first."""
    start = 0 if random.random() < 0.7 else random.randrange(len(data) + 1)
    value = random.choice(NUMBERS) + random.choice((0, 0, 1, -1))
    return data[:start] + (value % 2**64).to_bytes(8, "little") + data[start + 8 :]


BYTES: Sequence[Mutation] = (flip, truncate, splice, remove, number)


def damage_bytes(data: bytes, random: Random) -> bytes:
    """One or two mutations of bytes."""
    for _ in range(random.choice((1, 1, 2))):
        data = random.choice(BYTES)(data, random)
    return data


def damage_json(data: bytes, random: Random) -> bytes:
    """One to three values of a JSON text replaced, removed, renamed, doubled or swapped."""
    value = json.loads(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _damage(value, random)
    return json.dumps(value).encode()


def _damage(value: Any, random: Random) -> Any:
    places = list(_places(value))
    if not places:
        return copy.deepcopy(random.choice(VALUES))
    holder, key = random.choice(places)
    action = random.randrange(6)
    if action == 0 and isinstance(holder, dict):
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        renamed = random.choice((key[:-1], key + ".", key + "\n", "x", "", key.upper(), "\ud800"))
        holder[renamed] = holder.pop(key)
    elif action == 2:
        other, name = random.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif action == 3 and type(holder[key]) is int:
        holder[key] += random.choice((-1, 1, 2, 8, 2**40))
    else:
        holder[key] = copy.deepcopy(random.choice(VALUES))
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def damage_header(data: bytes, random: Random) -> bytes:
    """Damage the JSON of a safetensors file, its length field set right most of the time."""
    length = int.from_bytes(data[:8], "little")
    text = damage_json(data[8 : 8 + length], random)
    told = len(text) if random.random() < 0.95 else random.choice(NUMBERS) % 2**64
    return told.to_bytes(8, "little") + text + data[8 + length :]
