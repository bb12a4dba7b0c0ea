"""The output head of a Hugging Face model that adapters change: tied to the embedding, or not.

In PEFT an adapter changes a module, not the weight behind it. So a LoRA on the embedding of a tied
model leaves the head as it was, one on the head leaves the embedding, and a module in
``modules_to_save`` is a copy of its own. Merged, the two differ: the head is then written and the
configs untied. ``ensure_weight_tying`` keeps them one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.hf_form import HEAD, respelled
from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.tensor import Tensor, blocks, cast
from gemma_convert.convert.vocabulary import embedding_name
from gemma_convert.surgery.adapters.adapter import Adapter


def untie(
    tensors: Mapping[str, Tensor], adapters: Sequence[Adapter], model: Model, spelling: Spelling
) -> dict[str, Tensor]:
    """The head that a tied model needs to hold what ``adapters`` change, by its name; often none.

    Args:
        tensors: The base, spelled in ``spelling``, before anything is replaced or merged.
        adapters: With those that keep head and embedding tied, see `tied`.
        model: Tied.
        spelling: How the text model is named.

    Raises:
        AdapterError: If the layout has no place for a head.
    """
    embedding = embedding_name(model, Spelling(HF, ""))
    touching = [a for a in adapters if _changes(a, HEAD) or _moves_alone(a, embedding)]
    if not touching:
        return {}
    if spelling.layout is not HF:
        raise AdapterError(
            f"{touching[0].source}: it changes the embedding or the head of a tied model, which "
            f"then differ; the models of layout {spelling.layout.name} have one array for both",
            "write a Hugging Face directory",
        )
    both = [a for a in adapters if a.ties_head and _changes(a, embedding)]
    if both:
        raise AdapterError(
            f"{both[0].source} changes head and embedding alike, {touching[0].source} does not",
            "merge them one after the other, each into the output of the last",
        )
    own = [a.saved[embedding] for a in adapters if embedding in a.saved.keys() - a.copies]
    tied_to = tensors[embedding_name(model, spelling)]
    head = cast(own[-1], tied_to.dtype) if own else tied_to
    return {respelled(HEAD, HF.default_prefix, spelling.prefix): head}


def tied(adapter: Adapter, model: Model) -> Adapter:
    """``adapter`` of a tied model without what says of the head what is said of the embedding.

    That is so under ``ensure_weight_tying``, where head and embedding were saved equal, and where
    the base's own head was saved: it is the base's embedding.
    """
    embedding = embedding_name(model, Spelling(HF, ""))
    saved = dict(adapter.saved)
    changed = {HEAD, embedding} & adapter.pairs.keys()
    if adapter.ties_head and any(adapter.pairs[name].magnitude is not None for name in changed):
        raise AdapterError(
            f"{adapter.source}: DoRA on the embedding under ensure_weight_tying: PEFT scales the "
            "rows of the embedding and of the head tied to it each by a magnitude of its own",
            "merge it with PEFT itself",
        )
    equal = {HEAD, embedding} <= saved.keys() and _same(saved[HEAD], saved[embedding])
    if adapter.ties_head or (equal and not changed):
        return _without_head(replace(adapter, ties_head=True))
    if HEAD in saved.keys() - adapter.copies and embedding not in adapter.copies:
        moved = saved.pop(HEAD) if embedding not in saved else None
        if moved is not None:
            return replace(adapter, saved={**saved, embedding: moved})
        if equal:
            left = (saved.pop(HEAD), "tied to the embedding's")
            return replace(adapter, saved=saved, unused=(*adapter.unused, left))
    return adapter


def _without_head(adapter: Adapter) -> Adapter:
    left = [*adapter.pairs[HEAD].factors().values()] if HEAD in adapter.pairs else []
    left += [adapter.saved[HEAD]] if HEAD in adapter.saved else []
    return replace(
        adapter,
        pairs={name: pair for name, pair in adapter.pairs.items() if name != HEAD},
        saved={name: tensor for name, tensor in adapter.saved.items() if name != HEAD},
        unused=adapter.unused + tuple((tensor, "tied to the embedding's") for tensor in left),
    )


def untied_config(config: Mapping[str, object]) -> dict[str, object]:
    """``config`` with ``tie_word_embeddings`` false, at the top and in the text config."""
    changed = {**config, "tie_word_embeddings": False}
    text = config.get("text_config")
    if isinstance(text, Mapping):
        changed["text_config"] = {**text, "tie_word_embeddings": False}
    return changed


def _changes(adapter: Adapter, name: str) -> bool:
    return name in adapter.pairs or name in adapter.saved


def _moves_alone(adapter: Adapter, embedding: str) -> bool:
    """Whether the embedding changes and the head does not follow."""
    if adapter.ties_head:
        return False
    return embedding in adapter.pairs or embedding in adapter.copies


def _same(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and all(
        one.read(box).tobytes() == other.read(box).tobytes() for box in blocks(one)
    )
