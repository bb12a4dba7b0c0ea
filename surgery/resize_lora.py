"""Give an adapter another rank: fewer by its singular values, more by zeros."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemma_convert.convert.dtypes import DType
from gemma_convert.convert.errors import AdapterError
from gemma_convert.surgery.adapter_output import adapter_job, difference, span
from gemma_convert.surgery.adapters.adapter import Adapter, Pair
from gemma_convert.surgery.adapters.matrices import matrices, require_matrices, with_matrices
from gemma_convert.surgery.adapters.maxtext import LAYOUTS as MAXTEXT_LAYOUTS
from gemma_convert.surgery.adapters.open import Source, opened
from gemma_convert.surgery.adapters.paths import original_paths, renamed
from gemma_convert.surgery.adapters.values import check_values
from gemma_convert.surgery.exchange import Exchange
from gemma_convert.surgery.low_rank import Svd, product_svd


def resize_lora(
    source: Source,
    *,
    rank: int | None = None,
    share: float | None = None,
    alpha: float | None = None,
    dtype: DType | None = None,
) -> Exchange:
    """An adapter of another rank, in its own format; alpha / r, which multiplies B.A, stays.

    Args:
        source: The adapter, PEFT's or Tunix's.
        rank: Of every pair. A larger one than a pair's fills it with zeros.
        share: Instead of a rank: each pair gets the smallest that keeps this share of its energy.
        alpha: LoRA alpha, where a Tunix checkpoint does not say it.
        dtype: Of the factors; as they are if None.

    Raises:
        AdapterError: If it is not understood, or has factors of experts or of embeddings.
    """
    adapter = opened(source, alpha)
    require_matrices(adapter)
    if adapter.spelling.layout in MAXTEXT_LAYOUTS:
        raise AdapterError(
            f"{adapter.source}: a MaxText adapter, and none is written here",
            "make it a PEFT adapter first: gemma-convert orbax-to-peft",
        )
    check_values(adapter, allow_zero=True)
    pairs: dict[str, Pair] = {}
    modules: dict[str, Any] = {}
    for name, pair in adapter.pairs.items():
        pairs[name], modules[name] = _resized(pair, rank, share, dtype)
    resized = Adapter(
        pairs,
        {name: adapter.scale(name) * adapter.weight for name in pairs},
        adapter.spelling,
        adapter.source,
        kind=adapter.kind,
        saved=adapter.saved,
        copies=adapter.copies,
        ties_head=adapter.ties_head,
        notes=adapter.notes,
        unused=adapter.unused,
    )
    if source.is_peft:
        resized = renamed(resized, original_paths(source.checkpoint))
    config = source.checkpoint.metadata.get("adapter_config", {})
    return adapter_job(
        resized,
        (source.checkpoint,),
        None,
        details={"modules": modules},
        summary=_summary(modules),
        base=(config.get("base_model_name_or_path"), config.get("revision")),
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
    exact = wanted >= pair.rank and stored == pair.a.dtype
    same = exact and wanted == pair.rank
    resized = pair if same else with_matrices(pair, new_a, new_b, stored)
    told = {
        "rank_before": pair.rank,
        "rank": wanted,
        "energy": svd.kept(wanted),
        "relative_error": 0.0 if exact else difference((a, b), matrices(resized)),
    }
    return resized, told


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
