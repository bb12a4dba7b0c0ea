"""An adapter: pairs of factors with a scale each, and tensors that replace the base's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.tensor import Tensor, blocks
from gemma_convert.surgery.adapters.forms import QWIX, Form
from gemma_convert.surgery.trained_on import TrainedOn


@dataclass(frozen=True)
class Pair:
    """The two factors of one weight.

    Attributes:
        a: The factor with the inputs; its axes are `forms` [0]'s.
        b: The factor with the outputs.
        forms: How the factors lie; several where the adapter does not say and shapes must decide.
        experts: How many matrices the weight consists of.
        magnitude: DoRA's norm of each output, shape (outputs,); None for plain LoRA.
    """

    a: Tensor
    b: Tensor
    forms: tuple[Form, ...] = (QWIX,)
    experts: int = 1
    magnitude: Tensor | None = None

    @property
    def form(self) -> Form:
        """How the factors lie."""
        return self.forms[0]

    @property
    def rank(self) -> int:
        """The dimension that both factors share."""
        return self.a.shape[self.form.rank_axis] // self.experts

    def factors(self) -> dict[str, Tensor]:
        """What is stored, each under a short name."""
        found = {"a": self.a, "b": self.b}
        return found if self.magnitude is None else {**found, "magnitude": self.magnitude}


@dataclass(frozen=True)
class Adapter:
    """What a training run changed, apart from the base.

    Attributes:
        pairs: Weight name to factors. Weights of the text model are spelled in ``spelling``; others
            (a head, towers) by their Hugging Face names without a leading ``model.``.
        scales: Weight name to what A.B is multiplied by, alpha and rank resolved.
        spelling: The layout of the names.
        source: Where it was read from, for messages.
        kind: What it is, for people.
        saved: Weight name to a tensor that takes the place of the base's.
        copies: Those of ``saved`` that are copies of a module: what was tied to it is not changed.
        ties_head: A change of the embedding is one of the tied head too.
        weight: What all deltas are multiplied by.
        notes: What a user should know about how it was made.
        unused: Tensors of it that are left out, each with the reason.
        same_as: Digests of the adapters that it is in another spelling, or that it was combined
            from; see `identities`.
        trained_on: What is known of the base that training saw.
    """

    pairs: Mapping[str, Pair]
    scales: Mapping[str, float]
    spelling: Spelling
    source: str
    kind: str = "LoRA"
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()
    ties_head: bool = False
    weight: float = 1.0
    notes: tuple[str, ...] = ()
    unused: tuple[tuple[Tensor, str], ...] = ()
    same_as: tuple[str, ...] = ()
    trained_on: TrainedOn = field(default_factory=TrainedOn)

    def scale(self, name: str) -> float:
        """The factor by which A.B is multiplied for the weight ``name``, without `weight`."""
        return self.scales[name]

    @property
    def ranks(self) -> list[int]:
        """The ranks that occur."""
        return sorted({pair.rank for pair in self.pairs.values()})

    def weighted(self, weight: float) -> Adapter:
        """This adapter with all its deltas multiplied by ``weight``.

        Raises:
            AdapterError: If the weight is no finite number, or 0, or is not 1 though the adapter
                replaces tensors, of which there is no part.
        """
        if not np.isfinite(weight) or weight == 0:
            raise AdapterError(
                f"{self.source}: weight {weight:g}", "pass a finite one other than 0"
            )
        trained = self.copies | {name for name in self.saved if name.endswith(".bias")}
        if weight != 1 and trained:
            how = "modules_to_save" if min(trained) in self.copies else "bias"
            raise AdapterError(
                f"{self.source}: weight {weight:g}, but the adapter replaces "
                f"{min(trained)} ({how}), which cannot be done in part",
                "merge it with weight 1",
            )
        return replace(self, weight=weight)


def uniform(pairs: Mapping[str, Pair], alpha: float, spelling: Spelling, source: str) -> Adapter:
    """An adapter whose scale is ``alpha`` / rank for every pair."""
    scales = {name: alpha / pair.rank for name, pair in pairs.items()}
    return Adapter(pairs, scales, spelling, source)


def identities(adapter: Adapter) -> set[str]:
    """The digests by which an adapter is known: its own, and those from which it was made."""
    return {digest(adapter), *adapter.same_as}


def digest(adapter: Adapter) -> str:
    """sha256 over the names and values of all tensors of an adapter."""
    found = hashlib.sha256()
    tensors = {
        f"{name} {side}": factor
        for name, pair in adapter.pairs.items()
        for side, factor in pair.factors().items()
    }
    tensors |= {f"{name} saved": tensor for name, tensor in adapter.saved.items()}
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        for box in blocks(tensor):
            found.update(tensor.read(box).tobytes())
    return found.hexdigest()
