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
        dropped: Names of source tensors left out, each with the reason. Where several sources have
            a tensor of one name, its source is said behind it.
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


def make_plan(
    target: Checkpoint, sources: Sequence[Checkpoint], dropped: Mapping[int, str] | None = None
) -> Plan:
    """Plan to write ``target``, and prove that it accounts for all of ``sources``.

    Args:
        target: What will be written; what it says is left out already, is no whole tensor.
        sources: What it is made of.
        dropped: Why a source tensor is left out, by its identity: a name may be in two sources.

    Raises:
        LayoutError: If a source tensor is neither read by some target tensor nor dropped with a
            reason, or is both.
    """
    actions = {
        name: max((step.action for step in ancestry(tensor)), key=ACTIONS.index)
        for name, tensor in target.items()
    }
    read, reasons = reached(target), dropped or {}
    for source in sources:
        for name, tensor in source.items():
            _prove(source, name, tensor, id(tensor) in read, id(tensor) in reasons)
    names = {**target.dropped, **_by_name(sources, reasons)}
    return Plan(target.replace(dropped=names), tuple(sources), actions, names)


def unread(target: Checkpoint, reasons: Mapping[int, str]) -> dict[int, str]:
    """Those of ``reasons`` whose tensors ``target`` does not read."""
    read = reached(target)
    return {identity: reason for identity, reason in reasons.items() if identity not in read}


def reached(target: Checkpoint) -> set[int]:
    """Identities of all tensors that ``target`` is computed from."""
    return {id(step) for tensor in target.values() for step in ancestry(tensor)}


def _by_name(sources: Sequence[Checkpoint], reasons: Mapping[int, str]) -> dict[str, str]:
    """What the sources' readers left out, and the tensors that have a reason."""
    found = {name: reason for source in sources for name, reason in source.dropped.items()}
    several = Counter(name for source in sources for name in source)
    for source in sources:
        for name, tensor in source.items():
            if id(tensor) in reasons:
                told = name if several[name] == 1 else f"{name} of {source.source}"
                found[told] = reasons[id(tensor)]
    return found


def _prove(source: Checkpoint, name: str, tensor: Tensor, read: bool, dropped: bool) -> None:
    if read == dropped:
        state = "both read and dropped" if read else "neither read nor dropped"
        raise LayoutError(
            f"{source.source}: {name} {list(tensor.shape)} would be {state}",
            "nothing was written; please report this",
        )
