"""A plan: what will be made from what, with proof that nothing is lost or made twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.tensor import ACTIONS, Tensor, ancestry


@dataclass(frozen=True)
class Plan:
    """What will be written, computed from headers alone.

    Attributes:
        target: The tensors to write.
        sources: The checkpoints that they are read from.
        actions: Target name to what happens on the way: one of ``ACTIONS``.
        dropped: Names of source tensors left out, each with the reason.
    """

    target: Checkpoint
    sources: tuple[Checkpoint, ...]
    actions: Mapping[str, str]
    dropped: Mapping[str, str]

    @property
    def counts(self) -> dict[str, int]:
        """Number of target tensors by action, and of source tensors dropped."""
        counted = Counter(self.actions.values())
        return {**{a: counted[a] for a in ACTIONS if counted[a]}, "dropped": len(self.dropped)}


def make_plan(target: Checkpoint, sources: Sequence[Checkpoint]) -> Plan:
    """Plan to write ``target``, and prove that it accounts for all of ``sources``.

    Raises:
        LayoutError: If a source tensor is neither read by some target tensor nor dropped with a
            reason, or is both.
    """
    actions = {
        name: max((step.action for step in ancestry(tensor)), key=ACTIONS.index)
        for name, tensor in target.items()
    }
    read = reached(target)
    for source in sources:
        for name, tensor in source.items():
            _prove(source, name, tensor, id(tensor) in read, name in target.dropped)
    return Plan(target, tuple(sources), actions, target.dropped)


def reached(target: Checkpoint) -> set[int]:
    """Identities of all tensors that ``target`` is computed from."""
    return {id(step) for tensor in target.values() for step in ancestry(tensor)}


def _prove(source: Checkpoint, name: str, tensor: Tensor, read: bool, dropped: bool) -> None:
    if read == dropped:
        state = "both read and dropped" if read else "neither read nor dropped"
        raise LayoutError(
            f"{source.source}: {name} {list(tensor.shape)} would be {state}",
            "nothing was written; please report this",
        )
