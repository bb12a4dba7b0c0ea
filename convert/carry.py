"""What stands beside the text model of an output: towers, config, and how all is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemma_convert.convert.dtypes import DType
from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.fit import require_fit
from gemma_convert.convert.hf_form import HEAD, form_of, require_whole, respelled
from gemma_convert.convert.inputs import Inputs
from gemma_convert.convert.layouts import HF, Layout, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.parts import Parts
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, cast_floats
from gemma_convert.convert.towers import Found, beside, shortened

_REPLACED = "of the base: the checkpoint has its own weights"


@dataclass
class Carried:
    """The towers of an output.

    Attributes:
        tensors: Under the names of the output's layout.
        reasons: Why a source's tensor is left out, by its identity.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


def carry(
    towers: Iterable[Found],
    text: Spelling,
    *,
    like: Iterable[Found] = (),
    dtype: DType | None = None,
    computed: DType | None = None,
) -> Carried:
    """Convert towers to the spelling that goes with the text model's.

    Args:
        towers: The towers to convert.
        text: How the text model of the output is spelled.
        like: Towers whose names the output's are to look like, those of a base.
        dtype: Dtype of the tensors; as in the source if None.
        computed: Dtype of those whose values the layouts store differently; ``dtype`` if None.

    Raises:
        LayoutError: If a tower lacks a tensor, or copies of one differ.
    """
    carried = Carried()
    short = {tower.tower.name for tower in like if tower.shortened}
    for tower in towers:
        network = tower.config.network()
        if not network.is_in(text.layout):
            what = f"the {tower.tower.part} tower of this model, {tower.tower.name}"
            reason = f"layout {text.layout.name} has no names for {what}"
            carried.reasons |= {id(tensor): reason for tensor in tower.tensors.values()}
            continue
        target = beside(text)
        made = relayout(
            tower.tensors, network, tower.spelling, target, dtype=dtype, computed=computed
        )
        renamed = tower.tower.name in short
        carried.tensors |= {
            shortened(name, tower.tower, target) if renamed else name: tensor
            for name, tensor in made.items()
        }
        carried.reasons |= {
            id(tower.tensors[name]): reason
            for name, reason in made.dropped.items()
            if name in tower.tensors
        }
    return carried


def chosen(donor: Parts, base: Parts | None) -> tuple[Found, ...]:
    """The towers of whoever gives the text model, and those that only the base has."""
    known = {tower.tower.name for tower in donor.known}
    others = base.known if base is not None and base is not donor else ()
    return (*donor.known, *(t for t in others if t.tower.name not in known))


def replaced(base: Parts, towers: Iterable[Found]) -> Mapping[int, str]:
    """The tensors of ``base`` in whose place ``towers`` stand, with the reason."""
    names = {tower.tower.name for tower in towers}
    return {
        id(tensor): _REPLACED
        for tower in base.known
        if tower.tower.name in names
        for tensor in tower.tensors.values()
    }


@dataclass(frozen=True)
class Surroundings:
    """What stands beside the text model in an output, and how both are named.

    Attributes:
        spelling: How the text model is named.
        config: config.json; empty where nothing says it.
        tensors: Towers and a head of its own, under the names that go with `spelling`.
        reasons: Why a source's tensor is left out, by its identity.
        notes: What a user should know of it.
    """

    spelling: Spelling
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    reasons: Mapping[int, str]
    notes: tuple[str, ...] = ()


def surroundings(
    inputs: Inputs, donor: Parts, to: Layout, dtype: DType | None, computed: DType | None
) -> Surroundings:
    """What stands beside the text model of ``donor`` in layout ``to``.

    Args:
        inputs: What a conversion reads.
        donor: Which of them gives the text model.
        to: The layout to write.
        dtype: Dtype of the tensors; as they are if None.
        computed: Dtype of those whose values are computed; ``dtype`` if None.

    Raises:
        ConfigError: If there are towers beside a text model's config, or an HF directory is to be
            made and no config is known.
        LayoutError: If a tower lacks a tensor.
    """
    if to is HF:
        return _of_hf(inputs, donor, dtype, computed)
    spelling = Spelling(to, to.default_prefix)
    towers = carry(chosen(donor, inputs.other), spelling, dtype=dtype, computed=computed)
    return Surroundings(spelling, inputs.reference.config, towers.tensors, towers.reasons)


def _of_hf(
    inputs: Inputs, donor: Parts, dtype: DType | None, computed: DType | None
) -> Surroundings:
    """What the reference has is copied as it is, but for towers that the source has itself."""
    parts = inputs.other if inputs.other and inputs.other.spelling else inputs.own
    found = parts.spelling if parts.spelling and parts.spelling.layout is HF else None
    towers = () if found and donor is parts else donor.known
    carried = carry(
        towers,
        found or Spelling(HF, inputs.model.family.nested_prefix),
        like=parts.known if found else (),
        dtype=dtype,
        computed=computed,
    )
    reasons = {**carried.reasons, **(replaced(parts, towers) if found else {})}
    beside_text = dict(parts.towers) if found else {}
    for tower in parts.known if found else ():
        if not any(id(tensor) in reasons for tensor in tower.tensors.values()):
            _require_fit(tower)
    if found and donor is not parts:
        rest = _unknown(donor, found)
        _require_head(donor, rest, inputs.model)
        reasons |= {id(beside_text[name]): _REPLACED for name in rest if name in beside_text}
        beside_text |= rest
    copied = {
        name: cast_floats(tensor, dtype)
        for name, tensor in beside_text.items()
        if id(tensor) not in reasons
    }
    reference, others = inputs.reference, {**copied, **carried.tensors}
    form = form_of(reference, inputs.model, found.prefix if found else None, others)
    require_whole(reference.source, form, inputs.model, donor is inputs.own)
    return Surroundings(Spelling(HF, form.prefix), form.config, form.others, reasons, form.notes)


def _require_head(donor: Parts, rest: Mapping[str, Tensor], model: Model) -> None:
    """Refuse a Hugging Face donor that lacks a head of its own: the base's is another model's."""
    is_hf = donor.spelling is not None and donor.spelling.layout is HF
    if is_hf and not model.tied and not any(name.endswith(HEAD) for name in rest):
        raise ConfigError(
            f"{donor.text.source}: no {HEAD}, and config.json says that it is not the embedding",
            "give the checkpoint with its head",
        )


def _require_fit(tower: Found) -> None:
    """Refuse a tower that would be copied and not load, if its config makes sense."""
    try:
        network = tower.config.network()
    except ConfigError:  # of no matter to a copy
        return
    require_fit(tower.tensors, network, tower.spelling)


def _unknown(donor: Parts, to: Spelling) -> dict[str, Tensor]:
    """What stands beside a Hugging Face donor's text model and is of no known tower, as a head."""
    if donor.spelling is None or donor.spelling.layout is not HF:
        return {}
    known = {id(tensor) for tower in donor.known for tensor in tower.tensors.values()}
    return {
        respelled(name, donor.spelling.prefix, to.prefix): tensor
        for name, tensor in donor.towers.items()
        if id(tensor) not in known
    }


def around(parts: Parts, target: Spelling, like: Sequence[Found]) -> dict[str, Tensor]:
    """What stands beside the text model, known towers spelled as Hugging Face does.

    Args:
        parts: A checkpoint of any layout.
        target: A spelling of Hugging Face.
        like: Towers whose names others are to look like; see `known_names`.
    """
    towers = () if _is_hf(parts) else parts.known
    carried = carry(towers, target, like=like).tensors
    taken = {id(tensor) for tower in towers for tensor in tower.tensors.values()}
    others = {name: tensor for name, tensor in parts.towers.items() if id(tensor) not in taken}
    return {**carried, **others}


def known_names(apart: Sequence[Parts]) -> list[Found]:
    """The towers of those checkpoints that are spelled as Hugging Face does."""
    return [tower for parts in apart if _is_hf(parts) for tower in parts.known]


def _is_hf(parts: Parts) -> bool:
    return parts.spelling is not None and parts.spelling.layout is HF
