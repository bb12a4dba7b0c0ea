"""What an output does not read of its inputs: every such tensor gets its reason."""

from __future__ import annotations

from collections.abc import Mapping

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.inputs import Inputs
from gemma_convert.convert.plan import Plan, make_plan, reached

_UNKNOWN = "not part of the text model, nor of a tower known here that config.json describes"
_OWN = "the checkpoint has its own weights"


def plan_of(target: Checkpoint, inputs: Inputs, reasons: Mapping[int, str]) -> Plan:
    """Give every tensor that ``target`` does not read its reason, and prove the rest.

    Args:
        target: What will be written.
        inputs: What it is made of.
        reasons: Why a tensor is left out, by its identity.

    Raises:
        LayoutError: If a tensor is neither read nor left out with a reason.
    """
    read = reached(target)
    written = _names_on_disk(inputs)
    dropped = {written.get(name, name): reason for name, reason in target.dropped.items()}
    for checkpoint, parts in inputs.held():
        dropped |= {**checkpoint.dropped, **parts.dropped}
        for name, tensor in parts.towers.items():
            if id(tensor) not in read:
                dropped[name] = reasons.get(id(tensor), _UNKNOWN)
    for name, tensor in (inputs.base or {}).items():
        if id(tensor) not in read:
            dropped.setdefault(name, _OWN)
    for checkpoint in inputs.checkpoints:
        for name, tensor in checkpoint.items():
            if id(tensor) not in read and id(tensor) in reasons:
                dropped[name] = reasons[id(tensor)]
    return make_plan(target.replace(dropped=dropped), inputs.checkpoints)


def _names_on_disk(inputs: Inputs) -> dict[str, str]:
    """The source's own names of its text parameters, where the templates write them otherwise."""
    written = {id(tensor): name for name, tensor in inputs.source.items()}
    text = inputs.own.text.items()
    return {name: written[id(tensor)] for name, tensor in text if id(tensor) in written}
