"""Give an adapter another rank: fewer by its singular values, more by zeros."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gemma_convert.convert.dtypes import DType
from gemma_convert.convert.model import Model
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapter_output import adapter_job, difference, span
from gemma_convert.surgery.adapters.adapter import Pair, identities
from gemma_convert.surgery.adapters.in_form import in_form
from gemma_convert.surgery.adapters.known_base import carried
from gemma_convert.surgery.adapters.matrices import matrices, require_matrices, with_matrices
from gemma_convert.surgery.adapters.maxtext import unrolled
from gemma_convert.surgery.adapters.open import Source, opened
from gemma_convert.surgery.adapters.paths import paths_of, renamed
from gemma_convert.surgery.adapters.values import check_values
from gemma_convert.surgery.exchange import Exchange
from gemma_convert.surgery.low_rank import Svd, product_svd


def resize_lora(
    source: Source,
    *,
    rank: int | None = None,
    share: float | None = None,
    to_peft: bool | None = None,
    model: Model | None = None,
    config: Mapping[str, Any] | None = None,
    alpha: float | None = None,
    dtype: DType | None = None,
) -> Exchange:
    """An adapter of another rank; alpha / r, which multiplies B.A, stays.

    Args:
        source: The adapter.
        rank: Of every pair. A larger one than a pair's fills it with zeros.
        share: Instead of a rank: each pair gets the smallest that keeps this share of its energy.
        to_peft: Whether to write PEFT's format, else Tunix's; as the source if None, and Tunix's
            for one of MaxText.
        model: The base's dimensions, where the format changes.
        config: The base's config.json, with ``model``.
        alpha: LoRA alpha, where a Tunix checkpoint does not say it.
        dtype: Of the factors; as they are if None.

    Raises:
        AdapterError: If it is not understood, has factors of experts or of embeddings, or its
            format changes and ``model`` is None.
    """
    as_peft = source.is_peft if to_peft is None else to_peft
    own = opened(source, alpha)
    own = unrolled(own, model) if model is not None else own
    require_matrices(own)
    check_values(own, allow_zero=True)
    adapter = in_form(carried(own), model, to_peft=as_peft)
    pairs: dict[str, Pair] = {}
    modules: dict[str, Any] = {}
    for name, pair in adapter.pairs.items():
        pairs[name], modules[name] = _resized(pair, rank, share, dtype)
    scales = {name: adapter.scale(name) * adapter.weight for name in pairs}
    resized = replace(adapter, pairs=pairs, scales=scales, weight=1.0)
    if as_peft:
        resized = renamed(resized, paths_of([source.checkpoint], pairs, config))
    # The same deltas must not be merged into the same weights once more.
    same = all(m["relative_error"] == 0 and m["rank"] >= m["rank_before"] for m in modules.values())
    details = {"modules": modules, **({"same_as": sorted(identities(own))} if same else {})}
    beside = source.checkpoint.metadata.get("adapter_config", {})
    return adapter_job(
        resized,
        (source.checkpoint,),
        model,
        details=details,
        summary=_summary(modules),
        base=(beside.get("base_model_name_or_path"), beside.get("revision")),
    )


def _resized(
    pair: Pair, rank: int | None, share: float | None, dtype: DType | None
) -> tuple[Pair, dict[str, Any]]:
    """One pair of another rank, and what became of it."""
    a, b = matrices(pair)
    svd = product_svd(b, a)
    wanted = rank if rank is not None else _rank_for(svd, share or 1.0, pair.rank)
    stored = dtype or pair.a.dtype
    if wanted < pair.rank:
        new_a, new_b = svd.factors(wanted)
    else:
        missing = wanted - pair.rank
        new_a, new_b = np.pad(a, ((0, missing), (0, 0))), np.pad(b, ((0, 0), (0, missing)))
    same = wanted == pair.rank and (dtype is None or dtype == pair.a.dtype == pair.b.dtype)
    resized = pair if same else with_matrices(pair, new_a, new_b, stored)
    exact = wanted >= pair.rank and _equal(matrices(resized), (new_a, new_b))
    told = {
        "rank_before": pair.rank,
        "rank": wanted,
        "energy": svd.kept(wanted),
        "relative_error": 0.0 if exact else difference((a, b), matrices(resized)),
    }
    return resized, told


def _equal(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _rank_for(svd: Svd, share: float, most: int) -> int:
    return svd.rank_for(share) or most


def _summary(modules: dict[str, Any]) -> list[tuple[str, str]]:
    told = modules.values()
    worst = max(modules, key=lambda name: modules[name]["relative_error"])
    before, after = (span(m[key] for m in told) for key in ("rank_before", "rank"))
    return [
        ("resized", f"{len(modules)} pairs, rank {before} -> {after}"),
        ("energy kept", f"{span(round(m['energy'], 6) for m in told)} of each product's"),
        ("worst error", f"{modules[worst]['relative_error']:.3g} of the product's norm: {worst}"),
    ]
