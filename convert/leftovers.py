"""What an output does not read of its inputs: every such tensor gets its reason."""

from __future__ import annotations

from collections.abc import Mapping

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.inputs import Inputs
from gemma_convert.convert.parts import Parts
from gemma_convert.convert.plan import Plan, make_plan, unread
from gemma_convert.convert.tensor import ancestry

_UNKNOWN = "not part of the text model, nor of a tower known here that config.json describes"
_OWN = "of the base: the checkpoint has its own weights"


def plan_of(target: Checkpoint, inputs: Inputs, donor: Parts, reasons: Mapping[int, str]) -> Plan:
    """Give every tensor that ``target`` does not read its reason, and prove the rest.

    Args:
        target: What will be written.
        inputs: What it is made of.
        donor: Which of them gives the text model.
        reasons: Why a tensor is left out, by its identity.

    Raises:
        LayoutError: If a tensor is neither read nor left out with a reason.
    """
    known: dict[int, str] = {}
    if inputs.base is not None:
        known |= {id(tensor): _OWN for tensor in inputs.base.values()}
    for checkpoint, parts in inputs.held():
        towers = {id(tensor): _UNKNOWN for tensor in parts.towers.values()}
        if checkpoint is inputs.base:
            for tower in parts.known:
                towers |= {id(tensor): _OWN for tensor in tower.tensors.values()}
        known |= towers
    dropped = unread(target, known | dict(reasons))
    for checkpoint, parts in inputs.held():
        dropped |= {
            id(checkpoint[name]): why for name, why in parts.dropped.items() if name in checkpoint
        }
    layers: dict[str, str] = {}  # of stacked arrays, which are read for the other layers
    for name, why in target.dropped.items():
        if name in donor.text:
            dropped |= {id(step): why for step in ancestry(donor.text[name])}
        else:
            layers[name] = why
    return make_plan(target.replace(dropped=layers), inputs.checkpoints, dropped)
