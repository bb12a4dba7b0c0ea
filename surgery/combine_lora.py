"""Adapters of one base combined into one, by weight, module by module.

The methods are those of PEFT's ``add_weighted_adapter``, with its arithmetic:

    cat          the ranks one behind the other: the sum of the deltas, exactly
    svd          that sum, truncated by its singular values
    linear       the sums of the A's and of the B's: cheap, but products of A_i and B_j come in
    ties         TIES of the A's and of the B's
    dare-linear  DARE, then linear
    dare-ties    DARE, then TIES

A module that some adapters do not have is combined from those that have it. The scale of each input
(alpha / r, rsLoRA) goes into the factors; the output's is 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import copysign, sqrt
from typing import Any

import numpy as np

from gemma_convert.convert.dtypes import DType
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.model import Model
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapter_output import adapter_job, span
from gemma_convert.surgery.adapters.adapter import Adapter, Pair, identities
from gemma_convert.surgery.adapters.gather import refuse_twice
from gemma_convert.surgery.adapters.in_form import in_form
from gemma_convert.surgery.adapters.known_base import carried, one_base
from gemma_convert.surgery.adapters.matrices import matrices, require_matrices, with_matrices
from gemma_convert.surgery.adapters.maxtext import unrolled
from gemma_convert.surgery.adapters.open import Source, opened
from gemma_convert.surgery.adapters.paths import paths_of, renamed
from gemma_convert.surgery.adapters.values import check_values
from gemma_convert.surgery.exchange import Exchange
from gemma_convert.surgery.low_rank import product_svd
from gemma_convert.surgery.task_arithmetic import drop, linear, ties, trim

METHODS = ("cat", "svd", "linear", "ties", "dare-linear", "dare-ties")

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Recipe:
    """How to combine.

    Attributes:
        method: One of `METHODS`.
        rank: Of ``svd``'s output; the largest of the inputs' if None.
        density: The share of values that TIES and DARE keep.
        seed: Of what DARE drops.
    """

    method: str
    rank: int | None = None
    density: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class _Share:
    """What one adapter gives to a module: factors as matrices, and what their product counts."""

    a: Array
    b: Array
    weight: float
    pair: Pair
    number: int


def combine_lora(
    sources: Sequence[Source],
    recipe: Recipe,
    *,
    to_peft: bool | None = None,
    model: Model | None = None,
    config: Mapping[str, Any] | None = None,
    alpha: float | None = None,
    dtype: DType | None = None,
    twice: bool = False,
) -> Exchange:
    """One adapter made of several.

    Args:
        sources: Two or more, with a weight each.
        recipe: How.
        to_peft: Whether to write PEFT's format, else Tunix's; that of the first source if None.
        model: The base's dimensions, where formats differ.
        config: The base's config.json, with ``model``.
        alpha: LoRA alpha, where a Tunix checkpoint does not say it.
        dtype: Of the factors; float32 if None, since scales and sums are no values of 16 bits.
        twice: Whether one adapter may be there more than once.

    Raises:
        AdapterError: If an adapter is not plain LoRA or comes twice, formats differ and ``model``
            is None, training quantised their bases in different ways, or the method needs equal
            ranks and they differ.
    """
    as_peft = sources[0].is_peft if to_peft is None else to_peft
    some = any(source.takes_alpha for source in sources)
    given = [
        _plain(source, model, alpha if source.takes_alpha or not some else None)
        for source in sources
    ]
    if not twice:
        refuse_twice(given)
    trained_on, notes = one_base(given)
    bases = _bases(sources)
    if len(bases) > 1:
        notes += (f"the adapters name several bases, {', '.join(bases)}: are they one model?",)
    adapters = [in_form(adapter, model, to_peft=as_peft) for adapter in given]
    names = list(dict.fromkeys(name for adapter in adapters for name in adapter.pairs))
    pairs: dict[str, Pair] = {}
    for name in names:
        shares = [
            _Share(*matrices(a.pairs[name]), a.scale(name) * a.weight, a.pairs[name], number)
            for number, a in enumerate(adapters)
            if name in a.pairs
        ]
        a, b = _combined(name, shares, recipe)
        parents = tuple(factor for s in shares for factor in (s.pair.a, s.pair.b))
        pairs[name] = with_matrices(shares[0].pair, a, b, dtype or _FLOAT32, parents)
    made = Adapter(
        pairs,
        dict.fromkeys(pairs, 1.0),
        adapters[0].spelling,
        " + ".join(adapter.source for adapter in adapters),
        notes=(*(n for adapter in adapters for n in adapter.notes), *notes),
        unused=tuple(left for adapter in adapters for left in adapter.unused),
        trained_on=trained_on,
    )
    if as_peft:
        made = renamed(made, paths_of([source.checkpoint for source in sources], names, config))
    return adapter_job(
        made,
        [source.checkpoint for source in sources],
        model,
        details=_details(given, adapters, made, recipe),
        summary=_summary(adapters, made, recipe),
        base=next(iter(bases.items()), (None, None)),
    )


def _plain(source: Source, model: Model | None, alpha: float | None) -> Adapter:
    """The adapter of a source, with a pair a layer; it has a sum with others."""
    adapter = opened(source, alpha)
    adapter = unrolled(adapter, model) if model is not None else adapter
    check_values(adapter, allow_zero=True)
    require_matrices(adapter)
    magnitudes = [name for name, pair in adapter.pairs.items() if pair.magnitude is not None]
    for name in (*magnitudes, *adapter.saved):
        what = "a DoRA magnitude" if name in adapter.pairs else "a module saved whole"
        raise AdapterError(
            f"{adapter.source}: {name}: {what}, of which there is no sum",
            "merge the adapters: gemma-convert surgery merge-lora",
        )
    return carried(adapter)


def _combined(name: str, shares: Sequence[_Share], recipe: Recipe) -> tuple[Array, Array]:
    """A and B of one module."""
    if recipe.method in ("cat", "svd"):
        a = np.vstack([share.weight * share.a for share in shares])
        b = np.hstack([share.b for share in shares])
        if recipe.method == "cat":
            return a, b
        largest = max(len(share.a) for share in shares)
        return product_svd(b, a).factors(recipe.rank or largest)
    ranks = [len(share.a) for share in shares]
    if len(set(ranks)) > 1:
        listed = " and ".join(map(str, ranks))
        # Tunix's joined weights have the ranks of k and v behind one another
        apart = ", or --format peft if only stacked ranks differ" * shares[0].pair.form.is_qwix
        raise AdapterError(
            f"{name}: ranks {listed}, but {recipe.method} adds factor to factor",
            f"use svd or cat{apart}, or bring them to one rank first: gemma-convert surgery "
            "resize-lora",
        )
    # PEFT gives each factor the root of the weight, and the sign to A alone.
    roots = [sqrt(abs(share.weight)) for share in shares]
    signed = [copysign(root, share.weight) for root, share in zip(roots, shares, strict=True)]
    total = ties if recipe.method.endswith("ties") else linear
    a = total([_thinned(name, "a", share, recipe) for share in shares], signed)
    b = total([_thinned(name, "b", share, recipe) for share in shares], roots)
    return a, b


def _thinned(name: str, side: str, share: _Share, recipe: Recipe) -> Array:
    """One factor with the values that the method keeps."""
    factor = share.a if side == "a" else share.b
    if recipe.method == "linear" or recipe.density >= 1:
        return factor
    if recipe.method == "ties":
        return trim(factor, recipe.density)
    place = zlib.crc32(f"{name} {side}".encode())  # the same, whatever other modules there are
    random = np.random.default_rng([recipe.seed, share.number, place])
    return drop(factor, recipe.density, random)


def _bases(sources: Sequence[Source]) -> dict[str, str | None]:
    """The bases that PEFT adapters name, by Hub id or path, each with its revision."""
    configs = [source.checkpoint.metadata.get("adapter_config", {}) for source in sources]
    named = [(c.get("base_model_name_or_path"), c.get("revision")) for c in configs]
    return {str(name): revision for name, revision in named if name}


def _details(
    given: Sequence[Adapter], adapters: Sequence[Adapter], made: Adapter, recipe: Recipe
) -> dict[str, Any]:
    parts = sorted({known for adapter in given for known in identities(adapter)})
    return {
        "made_of": parts,
        "combined": [
            {"source": a.source, "weight": a.weight, "modules": len(a.pairs)} for a in adapters
        ],
        "recipe": asdict(recipe),
        "modules": {name: {"rank": pair.rank} for name, pair in made.pairs.items()},
    }


def _summary(adapters: Sequence[Adapter], made: Adapter, recipe: Recipe) -> list[tuple[str, str]]:
    return [
        ("combined", f"{len(adapters)} adapters by {recipe.method}"),
        ("pairs", f"{len(made.pairs)}, rank {span(made.ranks)}, scale 1"),
    ]
