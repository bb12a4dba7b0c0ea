"""LoRA adapters as Qwix and Tunix store them: finding the factors, the scale, the bad values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.tensor import Tensor


@dataclass(frozen=True)
class Pair:
    """The two factors of one module.

    Attributes:
        a: Shape ``(*inputs, r)``.
        b: Shape ``(r, *outputs)``.
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        """The dimension that both factors share."""
        return self.a.shape[-1]


@dataclass(frozen=True)
class Adapter:
    """LoRA pairs by the name of the weight that each belongs to.

    Attributes:
        pairs: Weight name, in the adapter's layout, to its factors.
        alpha: The numerator of the scale ``alpha / r``.
        spelling: The layout of the names.
        source: Where it was read from, for messages.
    """

    pairs: Mapping[str, Pair]
    alpha: float
    spelling: Spelling
    source: str

    def scale(self, name: str) -> float:
        """The factor by which A.B is multiplied for the weight ``name``."""
        return self.alpha / self.pairs[name].rank


def split_factors(checkpoint: Checkpoint) -> tuple[Checkpoint, dict[str, Pair]]:
    """Separate the LoRA factors of a Qwix / Tunix tree from its weights.

    Returns:
        The checkpoint without the factors, and weight name to pair.

    Raises:
        AdapterError: If a factor stands alone, the two ranks differ, or the weights are quantised.
    """
    factors: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in checkpoint.items():
        stem, mark, side = name.rpartition("_lora_")
        if mark and side in ("a", "b"):
            factors.setdefault(stem, {})[side] = tensor
        elif name.endswith((".array.qvalue", ".array.scale")):
            raise AdapterError(
                f"{checkpoint.source}: {name}: the checkpoint holds quantised weights (QLoRA), "
                "which cannot be merged into yet",
                "save the LoRA factors alone (Tunix: save_only_lora_params=True) and merge "
                "them onto the full-precision base",
            )
        else:
            weights[name] = tensor
    pairs = {stem: _pair(checkpoint.source, stem, sides) for stem, sides in factors.items()}
    return checkpoint.replace(tensors=weights), pairs


def _pair(source: str, stem: str, sides: Mapping[str, Tensor]) -> Pair:
    for side in ("a", "b"):
        if side not in sides:
            raise AdapterError(
                f"{source}: {stem}_lora_{side} is missing, its other factor is there",
                "the checkpoint is incomplete",
            )
    pair = Pair(sides["a"], sides["b"])
    if not pair.a.shape or not pair.b.shape or pair.a.shape[-1] != pair.b.shape[0]:
        raise AdapterError(
            f"{source}: {stem}: the factors disagree on the rank: "
            f"A {list(pair.a.shape)} ends in r, B {list(pair.b.shape)} begins with r",
            "they belong to different runs",
        )
    return pair


def stored_alpha(metadata: Mapping[str, Any]) -> float | None:
    """The alpha in a checkpoint's custom metadata, if it is there.

    ``{"lora": {"alpha": 16}}``, ``{"lora_alpha": 16}`` and ``{"alpha": 16}`` are understood.

    Raises:
        AdapterError: If there are several that differ, one is not a number, or the metadata asks
            for a scale other than alpha / r.
    """
    custom = metadata.get("custom_metadata") or {}
    nested = custom.get("lora")
    nested = nested if isinstance(nested, Mapping) else {}
    if nested.get("use_rslora") or custom.get("use_rslora"):
        raise AdapterError(
            "the checkpoint's metadata says use_rslora: its scale is alpha / sqrt(r)",
            "not supported yet; merge it where it was trained",
        )
    places = [nested.get("alpha"), nested.get("lora_alpha")]
    places += [custom.get("lora_alpha"), custom.get("alpha")]
    found = [place for place in places if place is not None]
    for value in found:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise AdapterError(
                f"the checkpoint's metadata says alpha {value!r}, which is not a number",
                "save it as a number",
            )
    if len(set(found)) > 1:
        listed = " and ".join(f"{value:g}" for value in found)
        raise AdapterError(f"the checkpoint's metadata says alpha {listed}", "save one of them")
    return float(found[0]) if found else None


def check_rank(metadata: Mapping[str, Any], pairs: Mapping[str, Pair]) -> None:
    """Refuse factors whose rank is not the one in the checkpoint's custom metadata, if any.

    Raises:
        AdapterError: If they differ; ``{"lora": {"rank": 8}}``, ``{"lora_rank": 8}`` and
            ``{"rank": 8}`` are understood.
    """
    custom = metadata.get("custom_metadata") or {}
    nested = custom.get("lora")
    nested = nested if isinstance(nested, Mapping) else {}
    places = (nested.get("rank"), nested.get("r"), custom.get("lora_rank"), custom.get("rank"))
    ranks = [place for place in places if place is not None]
    for rank, (name, pair) in ((rank, item) for rank in ranks for item in pairs.items()):
        if str(rank) != str(pair.rank):
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


def check_values(adapter: Adapter) -> None:
    """Read every factor once and refuse adapters that would harm or do nothing.

    Raises:
        AdapterError: If a factor holds NaN or infinity, or is all zero.
    """
    for name, pair in adapter.pairs.items():
        with np.errstate(over="ignore", under="ignore"):
            scale = np.float32(adapter.scale(name))
        if not 0 < scale < np.inf:
            raise AdapterError(
                f"{adapter.source}: {name}: alpha / r = {adapter.scale(name):g} is no float32",
                "pass the alpha of the training run",
            )
        for side, factor in (("a", pair.a), ("b", pair.b)):
            values = factor.numpy().astype(np.float32)
            if not np.isfinite(values).all():
                bad = int(np.size(values) - np.isfinite(values).sum())
                raise AdapterError(
                    f"{adapter.source}: {name}_lora_{side}: {bad} of {values.size} values are "
                    "NaN or infinite",
                    "the run diverged; take an earlier step",
                )
            if not values.any():
                raise AdapterError(
                    f"{adapter.source}: {name}_lora_{side} is all zero: the pair changes nothing",
                    "is this the step that was meant? Factors are zero before the first update",
                )
