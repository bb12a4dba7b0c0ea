"""What a checkpoint of LoRA factors says of the base that training saw.

In its custom metadata: the arguments of ``qwix.LoraRule`` that say how the base was quantised,
``{"lora": {"weight_qtype": "nf4", "tile_size": 32}}`` or in each of ``{"lora": {"rules": [...]}}``,
and ``{"lora": {"base_dtype": "bfloat16"}}``, our own: from which dtype. Qwix quantises in the dtype
that the weights have then, and gives it to the factors; those that were widened since have another.
An adapter_config.json of PEFT has no place for either: there the ledger beside it keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.tensor import Tensor
from gemma_convert.surgery.quantise import CODES, DTYPES, QTYPES, Scheme
from gemma_convert.surgery.quantised import Dequantised, tiles_of

TRAINED_ON = "trained_on"
"""Key in a ledger, and in the metadata of a checkpoint opened beside one, see `from_metadata`."""

_ARGUMENTS = ("weight_qtype", "tile_size", "weight_calibration_method", "act_qtype")
_BASE_DTYPE = "base_dtype"
_QTYPES = {dtype: qtype for qtype, dtype in CODES.items()}
_LARGEST_TILE = 2**31
_NOT = "full precision"
_FULL = "merge onto the full-precision base with --base-quantization none"


@dataclass(frozen=True)
class TrainedOn:
    """The base that training saw, as far as a checkpoint says it; not checked until it is used.

    Attributes:
        rules: Arguments of ``qwix.LoraRule`` that say how it was quantised, each set of them once.
            Empty where nothing is said: Tunix itself stores none.
        dtypes: Names of the dtypes from which; several where adapters of several were combined.
    """

    rules: tuple[Mapping[str, Any], ...] = ()
    dtypes: tuple[str, ...] = ()

    def scheme(self) -> Scheme | None:
        """How the base was quantised, if that is said.

        Raises:
            AdapterError: If rules differ in it, or they are not understood.
        """
        schemes = {_scheme(rule) for rule in self.rules}
        if len(schemes) > 1:
            listed = " and ".join(sorted(str(scheme or _NOT) for scheme in schemes))
            raise AdapterError(
                f"the checkpoint's metadata says that training quantised to {listed}", _FULL
            )
        scheme = schemes.pop() if schemes else None
        if scheme is None or len(self.dtypes) != 1:
            return scheme
        return replace(scheme, dtype=DTYPES.get(self.dtypes[0]))

    def base_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """`dtypes` as numpy's.

        Raises:
            AdapterError: If one is not known.
        """
        for name in self.dtypes:
            if name not in DTYPES:
                raise AdapterError(
                    f"the checkpoint's metadata says {_BASE_DTYPE} {name!r}",
                    f"known are {', '.join(DTYPES)}",
                )
        return tuple(DTYPES[name] for name in self.dtypes)

    @property
    def quantised(self) -> str:
        """How the base was quantised, for people, also where that is not understood; or empty."""
        return " and ".join(dict.fromkeys(map(_told, self.rules)))

    def __str__(self) -> str:
        """`quantised`, with the dtypes."""
        return self.quantised + (f", from {' or '.join(self.dtypes)}" if self.dtypes else "")

    def arguments(self) -> Mapping[str, Any]:
        """`rules` as what each rule of a written adapter has.

        Raises:
            AdapterError: If there are several.
        """
        if len({_told(rule) for rule in self.rules}) > 1:
            raise AdapterError(
                f"training quantised the base by several rules ({self}), which an adapter of Qwix "
                "written here cannot say of its modules",
                "merge the adapter as it is: gemma-convert surgery merge-lora",
            )
        return self.rules[0] if self.rules else {}

    def base_dtype(self) -> dict[str, Any]:
        """`dtypes` as an entry of ``{"lora": {...}}``."""
        if not self.dtypes:
            return {}
        return {_BASE_DTYPE: self.dtypes[0] if len(self.dtypes) == 1 else list(self.dtypes)}

    def entry(self) -> dict[str, Any]:
        """All of it as an entry of a ledger."""
        found = {"rules": [dict(rule) for rule in self.rules], **self.base_dtype()}
        return {TRAINED_ON: found} if self else {}

    def __bool__(self) -> bool:
        return bool(self.rules or self.dtypes)


def from_metadata(metadata: Mapping[str, Any]) -> TrainedOn:
    """What the metadata of a checkpoint says: its custom metadata, else the ledger beside it."""
    custom = _said((metadata.get("custom_metadata") or {}).get("lora"))
    other = _said(metadata.get(TRAINED_ON))
    return TrainedOn(custom.rules or other.rules, custom.dtypes or other.dtypes)


def of_codes(weights: Mapping[str, Tensor]) -> TrainedOn:
    """What the quantised weights beside factors say; nothing where they are of several schemes."""
    found = [
        weight
        for weight in weights.values()
        if isinstance(weight, Dequantised) and weight.zero is None and weight.codes.dtype in _QTYPES
    ]
    kinds = {(_QTYPES[weight.codes.dtype], str(weight.scale.dtype)) for weight in found}
    tiles = tiles_of(found)
    if len(kinds) != 1 or len(tiles) != 1:
        return TrainedOn()
    (qtype, dtype), tile = kinds.pop(), tiles[0]
    return TrainedOn(({"weight_qtype": qtype, **({"tile_size": tile} if tile else {})},), (dtype,))


def _said(lora: Any) -> TrainedOn:
    if not isinstance(lora, Mapping):
        return TrainedOn()
    rules = lora.get("rules")
    listed = [r for r in (rules if isinstance(rules, list) else [rules]) if isinstance(r, Mapping)]
    shared = "weight_qtype" in lora
    # a rule that says nothing leaves its modules as they are, unless what is said is of all
    places = [lora, *(r for r in listed if "weight_qtype" in r)] if shared else listed
    found = [_quantising(place) for place in places]
    found = found if any(found) else []
    dtype = lora.get(_BASE_DTYPE)
    dtypes = dtype if isinstance(dtype, list) else [] if dtype is None else [dtype]
    return TrainedOn(_once(found), _once(map(str, dtypes)))


def _quantising(place: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that quantise the base; none where it stays as it is."""
    if place.get("weight_qtype") is None:
        return {}
    return {key: place[key] for key in _ARGUMENTS if place.get(key) is not None}


def stored_scheme(metadata: Mapping[str, Any]) -> Scheme | None:
    """The scheme in a checkpoint's metadata, if it is there.

    Raises:
        AdapterError: If rules differ in it, or they are not understood.
    """
    return from_metadata(metadata).scheme()


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        if value not in found:  # mappings have no hash
            found.append(value)
    return tuple(found)


def _told(rule: Mapping[str, Any]) -> str:
    try:
        return str(_scheme(rule) or _NOT)
    except AdapterError:
        return ", ".join(f"{key} {value!r}" for key, value in rule.items())


def _scheme(rule: Mapping[str, Any]) -> Scheme | None:
    qtype, tile = rule.get("weight_qtype"), rule.get("tile_size")
    if qtype is None:
        return None
    method = rule.get("weight_calibration_method") or "absmax"
    plain = isinstance(tile, int | float) and not isinstance(tile, bool)
    number = tile is None or (plain and 0 <= tile <= _LARGEST_TILE)  # nan is not
    activations = rule.get("act_qtype")  # whose rounding no weights have
    if qtype not in QTYPES or method != "absmax" or not number or activations is not None:
        act = "" if activations is None else f"act_qtype {activations!r}, "
        raise AdapterError(
            f"the checkpoint's metadata says weight_qtype {qtype!r}, {act}tile_size {tile!r}, "
            f"calibration {method!r}, which are not understood together",
            f"known are {', '.join(QTYPES)} with a number and absmax; {_FULL}",
        )
    return Scheme(qtype, None if isinstance(tile, float) and tile == 1 else tile)
