"""Put the modules that an adapter saved whole (``modules_to_save``) in the place of the base's."""

from __future__ import annotations

from collections.abc import Sequence

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.model import Model
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.tensor import Tensor, cast
from gemma_convert.convert.vocabulary import embedding_name
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.peft_keys import weight_name


def replace_saved(
    weights: Checkpoint, adapters: Sequence[Adapter], model: Model, spelling: Spelling
) -> tuple[Checkpoint, list[Tensor]]:
    """``weights`` with the tensors that ``adapters`` saved, in the dtype of those they replace.

    Args:
        weights: The base, its text model spelled in ``spelling``.
        adapters: At most one of them may have saved the same tensor.
        model: The base's dimensions.
        spelling: How ``weights`` is spelled.

    Returns:
        The weights, and those of the base that were replaced.

    Raises:
        AdapterError: If the base has no such tensor, or one of another shape, or two adapters
            saved it.
    """
    found: dict[str, Tensor] = {}
    for adapter in adapters:
        own = _spelled(adapter, weights, model, spelling)
        for name, tensor in own.items():
            if name in found:
                raise AdapterError(
                    f"{adapter.source}: {name}: another adapter replaces it too",
                    "merge one of them alone",
                )
            found[name] = cast(tensor, weights[name].dtype)
    replaced = [weights[name] for name in found]
    return weights.replace(tensors={**weights.tensors, **found}), replaced


def _spelled(
    adapter: Adapter, weights: Checkpoint, model: Model, spelling: Spelling
) -> dict[str, Tensor]:
    """What ``adapter`` saved, by the names of ``weights``."""
    if not adapter.saved:
        return {}
    if spelling.layout.unstacked:
        raise AdapterError(
            f"{adapter.source}: it replaces {next(iter(adapter.saved))} (modules_to_save), which "
            f"layout {spelling.layout.name} stacks with other layers",
            f"write layout {spelling.layout.unstacked}",
        )
    names = {
        adapter.spelling.prefix + short
        for parameter in model.parameters()
        for short, _ in parameter.parts(adapter.spelling.layout)
    }
    text = {name: tensor for name, tensor in adapter.saved.items() if name in names}
    known = {weight_name(name): name for name in weights} if spelling.layout is HF else {}
    found = {known.get(n, n): tensor for n, tensor in adapter.saved.items() if n not in text}
    saved = text.get(embedding_name(model, adapter.spelling))
    rows = model.common.sizes["v"]
    if saved is not None and saved.shape[:1] not in ((), (rows,)):
        raise AdapterError(
            f"{adapter.source}: it saved the embedding of {saved.shape[0]} tokens, the base has "
            f"{rows}: tokens were added in training",
            f"resize the base first, with transformers' resize_token_embeddings({saved.shape[0]})",
        )
    if text:
        some = Checkpoint(text, source=adapter.source)
        found |= relayout(some, model, adapter.spelling, spelling, partial=True)
    for name, tensor in found.items():
        if name not in weights:
            raise AdapterError(
                f"{adapter.source}: it saved {name}, which the base does not have",
                "give the base that the adapter was trained on",
            )
        if weights[name].shape != tensor.shape:
            raise AdapterError(
                f"{adapter.source}: it saved {name} with shape {list(tensor.shape)}, the base's is "
                f"{list(weights[name].shape)}",
                "give the base that the adapter was trained on",
            )
    return found
