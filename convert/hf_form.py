"""The form of a Hugging Face directory: class, model_type, nesting and prefix chosen together.

A text model stands at the top level of config.json, has a class of its own and names that begin
with ``model.``; a model with towers nests it and begins its names otherwise. A directory that
mixes the two loads with random weights, and says so in a warning at best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.layouts import HF
from gemma_convert.convert.model import text_config
from gemma_convert.convert.presets.preset import Preset, hub_config
from gemma_convert.convert.rows import Family

HEAD = "lm_head.weight"
_IN_MEMORY = "model.language_model."  # read by every class with towers since transformers 4.52
_TOWERS = ("vision", "audio", "multi_modal_projector")


@dataclass(frozen=True)
class Form:
    """What is written beside the weights, and how they are named.

    Attributes:
        config: config.json.
        prefix: What stands before the names of the text model.
        notes: What was changed, for the user.
    """

    config: Mapping[str, Any]
    prefix: str
    notes: tuple[str, ...] = ()


def preset_form(preset: Preset, name: str, family: Family, *, multimodal: bool) -> Form:
    """The form of a directory that is made without a base.

    Args:
        preset: The public model.
        name: Its name, for the note.
        family: Its family.
        multimodal: Whether the weights have towers.
    """
    config = hub_config(preset, multimodal=multimodal)
    note = (
        f"config.json is made from what is known of {name}; tokenizer, chat template and "
        "generation settings are not: give a directory that has them with --base"
    )
    return Form(config, family.nested_prefix if _nested(config) else HF.default_prefix, (note,))


def base_form(
    config: Mapping[str, Any], family: Family, found: str | None, towers: Iterable[str], where: str
) -> Form:
    """The form of a directory made from a base: the base's own, where that agrees with itself.

    Its weights and the nesting of its config decide; class, model_type and prefix follow.

    Args:
        config: The base's config.json.
        family: Its family.
        found: Prefix of the base's text tensors; None if it has none.
        towers: Names of its other tensors.
        where: The base, for messages.

    Raises:
        ConfigError: If there are towers beside the config of a text model.
    """
    kind = _kind(config, family)
    nested = _nested(config)
    if kind is None or (nested and not kind.wrapper):
        usual = family.nested_prefix if nested else HF.default_prefix
        return Form(config, found or usual)
    tower = next((name for name in towers if any(word in name for word in _TOWERS)), None)
    if tower is not None and not nested:
        raise ConfigError(
            f"{where}: config.json is that of a text model ({config.get('model_type')}), but "
            f"{tower} is there",
            "give the config.json of the whole model, or leave such tensors out",
        )
    settled, notes = _settled(config, kind, nested)
    fitting = (family.nested_prefix, _IN_MEMORY) if nested else (HF.default_prefix,)
    if found is None or found in fitting:
        return Form(settled, found or fitting[0], notes)
    note = f"names begin with {fitting[0]} instead of {found}, as config.json asks for"
    return Form(settled, fitting[0], (*notes, note))


def respelled(name: str, found: str, prefix: str) -> str:
    """Name of a tower's tensor, or of the head, where the text's prefix changes to ``prefix``."""
    if found == prefix:
        return name
    if name.endswith(HEAD):
        return f"language_model.{HEAD}" if prefix == "language_model.model." else HEAD
    short = name.removeprefix("model.")
    return f"model.{short}" if prefix == _IN_MEMORY else short


def _nested(config: Mapping[str, Any]) -> bool:
    return text_config(config) is not config


def _kind(config: Mapping[str, Any], family: Family) -> Preset | None:
    """A public model of the same classes as ``config``'s, with towers if there is such a one."""
    found = {config.get("model_type"), text_config(config).get("model_type")}
    same = [
        preset
        for preset in family.presets.values()
        if found & {preset.text["model_type"], preset.wrapper.get("model_type", "")}
    ]
    return max(same, key=lambda preset: bool(preset.wrapper), default=None)


def _settled(
    config: Mapping[str, Any], kind: Preset, nested: bool
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """``config`` without a model_type or class that belongs to the other nesting."""
    alone = {"model_type": kind.text["model_type"], "architectures": [kind.text_class]}
    whole = {key: kind.wrapper.get(key) for key in alone}
    right, wrong = (whole, alone) if nested else (alone, whole)
    changes = {key: right[key] for key in alone if config.get(key) == wrong[key] is not None}
    how = "nested" if nested else "at the top level"
    notes = tuple(
        f"config.json: {key} is {_text(value)} instead of {_text(config[key])}, as the text model "
        f"stands {how}"
        for key, value in changes.items()
    )
    return {**config, **changes}, notes


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
