"""The form of a Hugging Face directory: class, model_type, nesting and prefix chosen together.

A text model stands at the top level of config.json, has a class of its own and names that begin
with ``model.``; a model with towers nests it and begins its names otherwise. A directory that
mixes the two loads with random weights, and says so in a warning at best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.layouts import HEADLESS, HF, IN_MEMORY
from gemma_convert.convert.model import Model, text_config
from gemma_convert.convert.presets.preset import Preset, hub_config
from gemma_convert.convert.rows import Family
from gemma_convert.convert.tensor import Tensor

HEAD = "lm_head.weight"
_TOWERS = ("vision", "audio", "multi_modal_projector")


@dataclass(frozen=True)
class Form:
    """What is written beside the text model, and how that is named.

    Attributes:
        config: config.json.
        prefix: What stands before the names of the text model.
        others: The other tensors, towers and a head of its own, under the names that go with it.
        notes: What a user should know of it.
    """

    config: Mapping[str, Any]
    prefix: str
    others: Mapping[str, Tensor]
    notes: tuple[str, ...]


def form_of(
    reference: Checkpoint, model: Model, found: str | None, others: Mapping[str, Tensor]
) -> Form:
    """The form of an output whose config comes from ``reference``.

    With a config.json it is the reference's own, where that agrees with itself; else weights and
    nesting decide, and class, model_type and prefix follow. Without one it is the Hub's for that
    public model.

    Args:
        reference: The base, or a source that is its own.
        model: The dimensions.
        found: What stands before the names of ``reference``'s text model; None if it is not in
            this layout.
        others: The towers, and a head of its own, named as beside ``found``; as the Hub does if
            that is None.

    Raises:
        ConfigError: If there are towers beside a text model's config, or no config is known.
    """
    if reference.config:
        config, notes = _base_config(reference, model.family, others, found in HEADLESS)
        prefix = _fitting_prefix(config, model.family, found)
    else:
        config, notes = _known_config(reference.source, model, others)
        prefix = model.family.nested_prefix if _nested(config) else HF.default_prefix
    if found not in (None, prefix):
        notes += (f"names begin with {prefix} instead of {found}, as config.json asks for",)
    renamed = {respelled(name, found or prefix, prefix): t for name, t in others.items()}
    return Form(config, prefix, renamed, notes)


def require_whole(where: str, form: Form, model: Model, own_weights: bool) -> None:
    """Refuse a Hugging Face output that lacks what its config.json announces.

    Args:
        where: Whose config.json it is, for the message.
        form: What is written beside the text model.
        model: The dimensions.
        own_weights: Whether the text model is the source's own; a base may lack what it lacks.

    Raises:
        ConfigError: If a tower or a head is missing.
    """
    for kind in ("vision", "audio"):
        announced = isinstance(form.config.get(f"{kind}_config"), Mapping)
        if own_weights and announced and not any(kind in name for name in form.others):
            raise ConfigError(
                f"{where}: config.json has {kind}_config, but no such weights are "
                "there: the output would load with random ones",
                "give a base with its weights, or a text-only config.json",
            )
    if not model.tied and not any(name.endswith(HEAD) for name in form.others):
        raise ConfigError(
            f"{where}: config.json: tie_word_embeddings is false, but there is no {HEAD}",
            "set it to true if the model's head is its embedding",
        )


def respelled(name: str, found: str, prefix: str) -> str:
    """Name of a tower's tensor, or of the head, where the text's prefix changes to ``prefix``."""
    if found == prefix:
        return name
    if name.endswith(HEAD):
        return f"language_model.{HEAD}" if prefix == "language_model.model." else HEAD
    short = name.removeprefix("model.")
    return f"model.{short}" if prefix == IN_MEMORY else short


def _known_config(
    where: str, model: Model, others: Iterable[str]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """What is known of a public model; towers ask for the class that has them."""
    preset, tower = model.family.presets.get(model.name or ""), _tower(others)
    if preset is None:
        raise ConfigError(
            f"{where}: no config.json, and none is known for {model.name}",
            "give the base model's Hugging Face directory with --base",
        )
    if tower is not None and not preset.wrapper:
        raise ConfigError(
            f"{where}: {tower} is there, but {model.name} is a text model",
            "name another one with --model",
        )
    note = (
        f"config.json is made from what is known of {model.name}; tokenizer, chat template and "
        "generation settings are not: give a directory that has them with --base"
    )
    return hub_config(preset, multimodal=tower is not None), (note,)


def _base_config(
    reference: Checkpoint, family: Family, others: Iterable[str], headless: bool
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The reference's config.json, without a model_type or class of the other nesting.

    A class without a head, which names its weights otherwise, becomes the one with it.
    """
    config = reference.config
    kind, nested, tower = _kind(config, family), _nested(config), _tower(others)
    if kind is None or (nested and not kind.wrapper):
        return config, ()  # of somebody else's class
    if tower is not None and not nested:
        raise ConfigError(
            f"{reference.source}: config.json is that of a text model "
            f"({config.get('model_type')}), but {tower} is there",
            "give the config.json of the whole model, or leave such tensors out",
        )
    alone = {"model_type": kind.text["model_type"], "architectures": [kind.text_class]}
    whole = {key: kind.wrapper.get(key) for key in alone}
    right, wrong = (whole, alone) if nested else (alone, whole)
    changes = {key: right[key] for key in alone if config.get(key) == wrong[key] is not None}
    if headless and right["architectures"] and config.get("architectures"):
        changes["architectures"] = right["architectures"]
    how = "nested" if nested else "at the top level"
    notes = tuple(
        f"config.json: {key} is {_text(value)} instead of {_text(config[key])}, as the text model "
        f"stands {how}"
        for key, value in changes.items()
    )
    return {**config, **changes}, notes


def _fitting_prefix(config: Mapping[str, Any], family: Family, found: str | None) -> str:
    """``found`` if the class of ``config`` reads names that begin so; else what the Hub has."""
    nested, kind = _nested(config), _kind(config, family)
    usual = family.nested_prefix if nested else HF.default_prefix
    known = kind is not None and (bool(kind.wrapper) or not nested)
    fits = {usual, IN_MEMORY} if nested else {usual}
    return found if found is not None and (found in fits or not known) else usual


def _kind(config: Mapping[str, Any], family: Family) -> Preset | None:
    """A public model of the same classes as ``config``'s, with towers if there is such a one."""
    told = (config.get("model_type"), text_config(config).get("model_type"))
    found = {model_type for model_type in told if isinstance(model_type, str)}
    same = [
        preset
        for preset in family.presets.values()
        if found & {preset.text["model_type"], preset.wrapper.get("model_type", "")}
    ]
    return max(same, key=lambda preset: bool(preset.wrapper), default=None)


def _tower(names: Iterable[str]) -> str | None:
    """The first of ``names`` that is a tower's; a head of its own is none."""
    return next((name for name in names if any(word in name for word in _TOWERS)), None)


def _nested(config: Mapping[str, Any]) -> bool:
    return text_config(config) is not config


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
