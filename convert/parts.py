"""A checkpoint taken apart: text parameters, towers, LoRA factors, and what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.layouts import Layout, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.registry import explain, recognise
from gemma_convert.convert.tensor import Tensor, blocks
from gemma_convert.convert.towers import Found, find_towers
from gemma_convert.surgery.adapters.adapter import Pair
from gemma_convert.surgery.adapters.qwix import split_factors


@dataclass(frozen=True)
class Parts:
    """What a checkpoint holds.

    Attributes:
        text: Parameters of the text model, named as the templates write them.
        spelling: How they are named; None where there are none.
        towers: Everything else that is weights: vision and audio parts, an untied head.
        known: Those of them that are parameters of a tower known here.
        pairs: LoRA pairs by the name of their weight.
        dropped: Names left out, each with the reason.
    """

    text: Checkpoint
    spelling: Spelling | None
    towers: Mapping[str, Tensor]
    pairs: Mapping[str, Pair]
    dropped: Mapping[str, str]
    known: tuple[Found, ...] = ()


def take_apart(checkpoint: Checkpoint, model: Model, layout: Layout | None = None) -> Parts:
    """Take ``checkpoint`` apart, by names alone.

    A tied model's head that repeats the embedding is dropped, after both were compared.

    Args:
        checkpoint: What was opened.
        model: Its dimensions.
        layout: The layout of its names; told from them if None.

    Raises:
        LayoutError: If the names fit no layout, or a tied head differs from the embedding.
        AdapterError: If LoRA factors do not form pairs.
    """
    weights, pairs = split_factors(checkpoint)
    if pairs and not explain(weights):
        left = dict.fromkeys(weights, "no weight of a layout known here, beside LoRA factors")
        return Parts(weights.replace(tensors={}), None, {}, pairs, left)
    if not weights:
        return Parts(weights, None, {}, pairs, {})
    named, spelling = recognise(weights, layout)
    text = {name: tensor for name, tensor in named.items() if _is_text(name, spelling)}
    taken = {id(tensor) for tensor in text.values()}
    towers = {name: tensor for name, tensor in weights.items() if id(tensor) not in taken}
    dropped: dict[str, str] = {}
    for head in [name for name in towers if name.endswith("lm_head.weight")]:
        if model.tied:
            _check_tied(checkpoint, head, spelling)
            del towers[head]
            dropped[head] = "tied to the embedding: written once"
    known = find_towers(named, model.towers, spelling)
    return Parts(checkpoint.replace(tensors=text), spelling, towers, pairs, dropped, known)


def _is_text(name: str, spelling: Spelling) -> bool:
    short = name.removeprefix(spelling.prefix)
    return name.startswith(spelling.prefix) and not short.startswith(spelling.layout.towers or "\0")


def _check_tied(checkpoint: Checkpoint, head: str, spelling: Spelling) -> None:
    name = f"{spelling.prefix}embed_tokens.weight"
    if name not in checkpoint:
        raise LayoutError(
            f"{checkpoint.source}: {head} is there, but not {name}, to which config.json ties it",
            "the checkpoint is incomplete: download it again",
        )
    one, other = checkpoint[head], checkpoint[name]
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    if not same or not all(
        one.read(box).tobytes() == other.read(box).tobytes() for box in blocks(other)
    ):
        raise LayoutError(
            f"{checkpoint.source}: {head} differs from the embedding, but config.json ties them",
            "set tie_word_embeddings to false if the head is meant to be its own, "
            "or remove the tensor",
        )
