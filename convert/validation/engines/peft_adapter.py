"""PEFT's own LoRA layers in a model of transformers, every tensor of the file in its place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gemma_convert.convert.errors import InputError
from gemma_convert.surgery.adapters.peft_keys import read_key, unwrapped, weight_name

_Value = TypeVar("_Value")
_PREFIX = "base_model.model."
_REMEDY = "give the base that it was trained on, or merge it (surgery merge-lora)"


def adapted(model: Any, directory: Path) -> Any:
    """The model, in evaluation mode, with the adapter of ``directory`` in it.

    A module that PEFT adapts, but of which the file has nothing, stays as it is in the base. A
    model on torch's meta device tells whether an adapter fits, without any weight of the base.

    Raises:
        InputError: If PEFT refuses it, a tensor of the file finds no place, or part of a module's
            factors is missing.
    """
    from peft import PeftConfig, PeftModel
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict

    weights = [f"{name}.weight" for name, _ in model.named_modules()]
    try:
        with warnings.catch_warnings(action="ignore"):
            config: Any = PeftConfig.from_pretrained(str(directory))
            config.inference_mode = True
            if model.device.type == "meta" or config.init_lora_weights is False:
                config.init_lora_weights = True  # what the file does not have changes nothing
            made = PeftModel(model, config)
            read = load_peft_weights(str(directory), device="cpu")
            found: Any = set_peft_model_state_dict(made, placed(read, weights))
    except Exception as error:
        raise InputError(
            f"{directory}: PEFT does not load it: {type(error).__name__}: {error}", _REMEDY
        ) from error
    unexpected = sorted(found.unexpected_keys)
    if unexpected:
        raise InputError(
            f"{directory}: {_named(unexpected)}: expected a place in {type(model).__name__} for "
            "every tensor, found none in PEFT's layers",
            _REMEDY,
        )
    missing = set(found.missing_keys)
    held = {_module(key) for key in made.state_dict() if ".lora_" in key and key not in missing}
    half = sorted(key for key in missing if ".lora_" in key and _module(key) in held)
    if half:
        raise InputError(
            f"{directory}: expected {_named(half)}, found other factors of that module alone",
            _REMEDY,
        )
    return made.eval()


def placed(tensors: Mapping[str, _Value], weights: Iterable[str]) -> dict[str, _Value]:
    """An adapter's tensors, renamed to where PEFT has them in a model of other prefixes.

    Args:
        tensors: By their names in the file; wrappers and an adapter's name may stand in them.
        weights: Names of the model's weights.

    Raises:
        ValueError: If two tensors come to one name.
    """
    places = {weight_name(weight): weight for weight in weights}
    found: dict[str, _Value] = {}
    for text, value in tensors.items():
        key, clean = read_key(text), unwrapped(text)
        path = key.module if key.factor == "saved" else f"{key.module}.weight"
        short = weight_name(path)
        if short in places and path.endswith(short):
            theirs = places[short].removesuffix(short)
            clean = theirs + clean.removeprefix(path.removesuffix(short))
        if key.adapter is not None:
            head, factor, leaf = clean.rpartition(f".{key.adapter}")
            clean = head + leaf if factor else clean
        if _PREFIX + clean in found:
            raise ValueError(f"{text}: another tensor stands for the same weight")
        found[_PREFIX + clean] = value
    return found


def _module(key: str) -> str:
    return key.partition(".lora_")[0]


def _named(keys: list[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
