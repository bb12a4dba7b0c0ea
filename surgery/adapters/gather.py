"""All adapters of a job: the factors in its source and those given beside it, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.model import Model
from gemma_convert.convert.readers.provenance import same_as
from gemma_convert.surgery import head
from gemma_convert.surgery.adapters.adapter import Adapter, Pair, identities
from gemma_convert.surgery.adapters.maxtext import unrolled
from gemma_convert.surgery.adapters.open import Source, opened
from gemma_convert.surgery.adapters.qwix import read_qwix, stored_alpha
from gemma_convert.surgery.adapters.values import check_values


def gather(
    source: Checkpoint,
    pairs: Mapping[str, Pair],
    others: Sequence[Source],
    model: Model,
    *,
    alpha: float | None,
    allow_zero: bool,
) -> tuple[Adapter, ...]:
    """The adapter that ``source`` holds, if any, and the others; their values checked.

    Args:
        source: What is converted.
        pairs: The Qwix factors in it.
        others: Adapters beside it.
        model: The base's dimensions.
        alpha: LoRA alpha of the Tunix checkpoints that do not say it; there must be one.
        allow_zero: Whether a pair may be all zero.

    Raises:
        AdapterError: If one of them is not understood, or would harm or do nothing.
    """
    elsewhere = any(other.takes_alpha for other in others)
    if not pairs and alpha is not None and not elsewhere:
        raise AdapterError(
            f"{source.source}: it holds no LoRA factors that --alpha {alpha:g} could scale",
            "give the checkpoint with the factors, or leave --alpha out",
        )
    found = []
    if pairs:
        own = None if elsewhere and stored_alpha(source.metadata) is not None else alpha
        found.append(read_qwix(pairs, source.metadata, own, source.source))
    found += [opened(other, alpha if other.takes_alpha else None) for other in others]
    found = [unrolled(adapter, model) for adapter in found]
    for adapter in found:
        check_values(adapter, allow_zero=allow_zero)
    return tuple(head.tied(adapter, model) if model.tied else adapter for adapter in found)


def refuse_merged(
    source: str, adapters: Sequence[Adapter], before: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse adapters that are in the weights already, or come twice.

    Args:
        source: The weights, for messages.
        adapters: What is to be merged.
        before: What the ledger of the weights says was merged.

    Raises:
        AdapterError: If one of ``adapters`` has the factors of one of ``before``, or of another, or
            is DoRA, whose change depends on the weights that it was trained on.
    """
    normed = [a for a in adapters if any(p.magnitude is not None for p in a.pairs.values())]
    if before and normed:
        raise AdapterError(
            f"{normed[0].source}: DoRA, and others are merged into {source}: it changes weights by "
            "their norm, so its change of these is another than of those before",
            "merge all of them at once, or, if it was trained on these weights, add --force",
        )
    merged = {known for entry in before for known in (entry["factors_sha256"], *same_as(entry))}
    for adapter in adapters if merged else ():
        if identities(adapter) & merged:
            raise _again(
                adapter, f"it is merged into {source} already, says the conversion.json there"
            )
    refuse_twice(adapters)


def refuse_twice(adapters: Sequence[Adapter]) -> None:
    """Refuse adapters of which one comes twice, be it in another form.

    Raises:
        AdapterError: If two have the same factors.
    """
    given: dict[str, str] = {}
    for adapter in adapters if len(adapters) > 1 else ():
        known = identities(adapter)
        other = next((given[one] for one in sorted(known) if one in given), None)
        if other is not None:
            raise _again(adapter, f"{other} holds the same factors")
        given |= dict.fromkeys(known, adapter.source)


def _again(adapter: Adapter, why: str) -> AdapterError:
    return AdapterError(
        f"{adapter.source}: {why}", "leave it out, or add it a second time with --force"
    )
