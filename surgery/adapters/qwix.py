"""LoRA adapters as Qwix and Tunix store them: ``<weight>_lora_a`` and ``_b`` in an Orbax tree.

MaxText's are told by their names and spelled by `maxtext`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import TUNIX, Spelling
from gemma_convert.convert.readers.provenance import same_as
from gemma_convert.convert.tensor import Tensor
from gemma_convert.surgery.adapters import maxtext
from gemma_convert.surgery.adapters.adapter import Adapter, Pair
from gemma_convert.surgery.adapters.forms import Form
from gemma_convert.surgery.quantised import dequantised
from gemma_convert.surgery.trained_on import from_metadata

ALPHAS = "alpha_by_module"
"""Key of our own beside ``alpha`` in ``{"lora": {...}}``: weight name to its alpha."""


def read_qwix(
    pairs: Mapping[str, Pair], metadata: Mapping[str, Any], alpha: float | None, source: str
) -> Adapter:
    """The adapter of a Tunix or MaxText checkpoint; every scale is alpha / r.

    Args:
        pairs: As `split_factors` found them.
        metadata: The checkpoint's.
        alpha: As given by the user, for checkpoints that do not say it.
        source: The checkpoint, for messages.

    Raises:
        AdapterError: If alpha is not known, or metadata, ``alpha`` and factors disagree.
    """
    check_rank(metadata, pairs)
    own = _alphas(metadata, pairs, source)
    rest = [name for name in pairs if name not in own]
    shared = resolve_alpha(metadata, alpha, source) if rest else 0.0
    alphas = {**dict.fromkeys(rest, shared), **own}
    scales = {name: alphas[name] / pair.rank for name, pair in pairs.items()}
    adapter = Adapter(
        pairs,
        scales,
        Spelling(TUNIX, ""),
        source,
        kind="Qwix LoRA",
        same_as=same_as(metadata),
        trained_on=from_metadata(metadata),
    )
    if not any(maxtext.is_maxtexts(name) for name in pairs):
        return adapter
    return maxtext.spelled(adapter)


def split_factors(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Pair]]:
    """Separate the LoRA factors of a Qwix, Tunix or MaxText tree from its weights.

    Returns:
        The checkpoint without the factors, quantised weights dequantised, and weight name to pair.

    Raises:
        AdapterError: If a factor stands alone, or the two ranks differ.
        InputError: If a quantised weight lacks a part.
    """
    factors: dict[tuple[str, bool], dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in checkpoint.items():
        stem, mark, side = name.rpartition("_lora_")
        native = maxtext.native_factor(name)
        if native is not None:
            factors.setdefault((native[0], True), {})[native[1]] = tensor
        elif mark and side in ("a", "b"):
            factors.setdefault((stem, False), {})[side] = tensor
        else:
            weights[name] = tensor
    pairs: dict[str, Pair] = {}
    for (stem, is_native), sides in factors.items():
        if stem in pairs:
            raise AdapterError(
                f"{checkpoint.source}: {stem} has factors by MaxText and by Qwix",
                "remove those that are not meant",
            )
        pairs[stem] = _pair(checkpoint.source, stem, sides, maxtext.forms(stem, native=is_native))
    return checkpoint.replace(tensors=dequantised(checkpoint.source, weights)), pairs


def _pair(source: str, stem: str, sides: Mapping[str, Tensor], forms: tuple[Form, ...]) -> Pair:
    for side in ("a", "b"):
        if side not in sides:
            raise AdapterError(
                f"{source}: {stem}_lora_{side} is missing, its other factor is there",
                "the checkpoint is incomplete",
            )
    pair = Pair(sides["a"], sides["b"], forms)
    # of MaxText's layers, that may lie in front of the rank, the model will tell more
    leading = pair.b.shape[: 3 if maxtext.is_maxtexts(stem) else 1]
    if not pair.a.shape or pair.a.shape[-1] not in leading:
        raise AdapterError(
            f"{source}: {stem}: the factors disagree on the rank: "
            f"A {list(pair.a.shape)} ends in r, B {list(pair.b.shape)} begins with r",
            "they belong to different runs",
        )
    if not pair.rank:
        raise AdapterError(
            f"{source}: {stem}: the factors have rank 0", "the checkpoint is damaged"
        )
    return pair


def stored_alpha(metadata: Mapping[str, Any]) -> float | None:
    """The alpha in a checkpoint's custom metadata, if it is there.

    ``{"lora": {"alpha": 16}}``, ``{"lora_alpha": 16}`` and ``{"alpha": 16}`` are understood, and
    the adapter_config.json that MaxText writes beside the steps.

    Raises:
        AdapterError: If there are several that differ, one is not a number, or the metadata asks
            for a scale other than alpha / r.
    """
    custom, nested = _custom(metadata)
    beside = maxtext.beside(metadata)
    if nested.get("use_rslora") or custom.get("use_rslora"):
        raise AdapterError(
            "the checkpoint's metadata says use_rslora: its scale is alpha / sqrt(r), which Qwix "
            "does not have",
            "save alpha * sqrt(r) as alpha, and no use_rslora",
        )
    places = [nested.get("alpha"), nested.get("lora_alpha")]
    places += [custom.get("lora_alpha"), custom.get("alpha"), beside.get("lora_alpha")]
    found = [_number(place) for place in places if place is not None]
    if len(set(found)) > 1:
        listed = " and ".join(f"{value:g}" for value in found)
        raise AdapterError(f"the checkpoint's metadata says alpha {listed}", "save one of them")
    return found[0] if found else None


def check_rank(metadata: Mapping[str, Any], pairs: Mapping[str, Pair]) -> None:
    """Refuse factors whose rank is not the one in the checkpoint's custom metadata, if any.

    Raises:
        AdapterError: If they differ; ``{"lora": {"rank": 8}}``, ``{"lora_rank": 8}`` and
            ``{"rank": 8}`` are understood.
    """
    custom, nested = _custom(metadata)
    places = [nested.get("rank"), nested.get("r"), nested.get("lora_rank")]
    places += [custom.get("lora_rank"), custom.get("rank"), maxtext.beside(metadata).get("r")]
    ranks = [place for place in places if place is not None]
    for rank, (name, pair) in ((rank, item) for rank in ranks for item in pairs.items()):
        if rank not in (pair.rank, str(pair.rank)):
            raise AdapterError(
                f"{name}: the factors have rank {pair.rank}, the checkpoint's metadata says {rank}",
                "factors and metadata belong to different runs",
            )


def resolve_alpha(metadata: Mapping[str, Any], given: float | None, source: str) -> float:
    """The alpha of an adapter: from the checkpoint's custom metadata, else as given.

    Raises:
        AdapterError: If neither says it, or they disagree.
    """
    stored = stored_alpha(metadata)
    if stored is None and given is None:
        raise AdapterError(
            f"{source}: alpha is not stored in the checkpoint, and it cannot be guessed: "
            "the factors give the rank r, but the scale is alpha / r and any alpha fits them",
            "pass --alpha with the value of the training run",
        )
    if stored is not None and given is not None and stored != given:
        raise AdapterError(
            f"{source}: the checkpoint's metadata says alpha {stored:g}, --alpha says {given:g}",
            "leave --alpha out to use the stored value",
        )
    alpha = stored if stored is not None else given
    assert alpha is not None
    if not np.isfinite(alpha) or alpha <= 0:
        raise AdapterError(f"{source}: alpha is {alpha:g}", "pass a finite value above 0")
    return alpha


def _alphas(
    metadata: Mapping[str, Any], pairs: Mapping[str, Pair], source: str
) -> dict[str, float]:
    """The alphas that the metadata gives to single modules."""
    found = _custom(metadata)[1].get(ALPHAS) or {}
    if not isinstance(found, Mapping) or not found.keys() <= pairs.keys():
        raise AdapterError(
            f"{source}: the checkpoint's metadata names modules in {ALPHAS} that it does not have",
            "factors and metadata belong to different runs",
        )
    return {name: _number(value) for name, value in found.items()}


def _custom(metadata: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The custom metadata, and what it nests under ``lora``."""
    custom = metadata.get("custom_metadata") or {}
    nested = custom.get("lora")
    return custom, nested if isinstance(nested, Mapping) else {}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterError(
            f"the checkpoint's metadata says alpha {value!r}, which is not a number",
            "save it as a number",
        )
    return float(value)
