"""Bring two checkpoints to one spelling, so that their tensors can be compared by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemma_convert.convert.carry import around, known_names
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import InputError, LayoutError
from gemma_convert.convert.hf_form import respelled
from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.parts import Parts, take_apart
from gemma_convert.convert.registry import families, named_model, recognise
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, ancestry, cast
from gemma_convert.convert.towers import Found
from gemma_convert.convert.vocabulary import as_stored


@dataclass(frozen=True)
class Aligned:
    """Two checkpoints whose names mean the same.

    Attributes:
        a: Tensors of the first.
        b: Tensors of the second.
        spelling: How both are named.
        notes: What was done to get there.
    """

    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]
    spelling: str
    notes: tuple[str, ...] = ()


def align(a: Checkpoint, b: Checkpoint, model: str | None = None) -> Aligned:
    """Spell ``a`` and ``b`` alike.

    Where a config or ``model`` tells the dimensions, both are brought to Hugging Face's layout,
    which tells keys from values and gates from ups. Without, two checkpoints of one layout keep
    their names, and names that fit no layout are compared as they are.

    Args:
        a: The first.
        b: The second.
        model: Name of a public model, where neither has a config.json.

    Raises:
        InputError: If the layouts differ and nothing tells the dimensions.
        LayoutError: If the tensors are not those of the config.
    """
    try:
        (named_a, one), (named_b, other) = recognise(a), recognise(b)
    except LayoutError:
        return Aligned(a, b, "as they are", ("names of no known layout: compared by name",))
    dims = _dimensions(a, b, model)
    if one.layout is other.layout and (one.layout is HF or dims is None):
        return Aligned(named_a, renamed(named_b, other, one), str(one))
    if dims is None:
        raise InputError(
            f"{a.source} and {b.source} are in different layouts, and neither has a config.json",
            "name the model with --model",
        )
    target = next((s for s in (one, other) if s.layout is HF), Spelling(HF, HF.default_prefix))
    note = f"compared in layout {target}: the first is in {one.layout.name}, "
    note += f"the second in {other.layout.name}"
    taken = [take_apart(checkpoint, dims) for checkpoint in (a, b)]
    like = known_names(taken)
    first, second = (_relaid(parts, dims, target, like) for parts in taken)
    return Aligned(_as_stored(first, second), _as_stored(second, first), str(target), (note,))


def _as_stored(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, those whose values were computed in the dtype that the other side has.

    A layout that stores other values keeps them in a wider dtype so that the way back finds them.
    """
    return {
        name: cast(tensor, others[name].dtype)
        if name in others and any(step.action == "computed" for step in ancestry(tensor))
        else tensor
        for name, tensor in tensors.items()
    }


def renamed(tensors: Mapping[str, Tensor], old: Spelling, new: Spelling) -> dict[str, Tensor]:
    """``tensors`` under another prefix, what stands beside the text model as goes with it."""

    def respell(name: str) -> str:
        if name.startswith(old.prefix):
            return new.prefix + name.removeprefix(old.prefix)
        return respelled(name, old.prefix, new.prefix)

    return {respell(name): tensor for name, tensor in tensors.items()}


def _dimensions(a: Checkpoint, b: Checkpoint, name: str | None) -> Model | None:
    if name is not None:
        return named_model(name)
    config = next((checkpoint.config for checkpoint in (a, b) if checkpoint.config), None)
    return read_model(config, families()) if config else None


def _is_hf(parts: Parts) -> bool:
    return parts.spelling is not None and parts.spelling.layout is HF


def _relaid(
    parts: Parts, model: Model, target: Spelling, like: Sequence[Found]
) -> dict[str, Tensor]:
    """All weights of a checkpoint: text model and known towers in ``target``, others as they are.

    Args:
        parts: The checkpoint.
        model: Its dimensions.
        target: The spelling wanted.
        like: Towers whose names others are to look like.
    """
    assert parts.spelling is not None
    text: Mapping[str, Tensor] = parts.text
    if parts.spelling != target:
        stored = as_stored(model, parts.text, parts.spelling)
        text = relayout(parts.text, stored, parts.spelling, target)
    factors = {
        f"{name}_lora_{side}": factor
        for name, pair in parts.pairs.items()
        for side, factor in pair.factors().items()
    }
    return {**text, **around(parts, target, like), **factors}
