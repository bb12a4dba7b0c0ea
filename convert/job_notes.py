"""What a user should know of a conversion before it runs: rounding, mixed dtypes, RoPE."""

from __future__ import annotations

from collections.abc import Mapping

from gemma_convert.convert import dtypes
from gemma_convert.convert.layouts import HF, Layout
from gemma_convert.convert.printable import counted
from gemma_convert.convert.tensor import Tensor, ancestry
from gemma_convert.convert.values import Revalued

_EXACT_BYTES = 4


def computed_note(target: Mapping[str, Tensor], source: Layout, to: Layout) -> tuple[str, ...]:
    """What to say of tensors whose values are computed, and may not give the source's back.

    Args:
        target: What will be written.
        source: The layout that is read.
        to: The layout that is written.
    """
    lossy = [name for name, tensor in target.items() if any(map(_loses, ancestry(tensor)))]
    if not lossy:
        return ()
    option = "--dtype float32" if to is HF else "--computed-dtype float32"
    return (
        f"{source.name} and {to.name} store other values in {counted(len(lossy), 'tensor')}, such "
        f"as {lossy[0]}: they are computed in float32 and stored in {target[lossy[0]].dtype}, from "
        f"which not all of {source.name}'s can be computed again; {option} stores them so that "
        "they can",
    )


def _loses(step: Tensor) -> bool:
    return isinstance(step, Revalued) and step.may_lose and step.dtype.itemsize < _EXACT_BYTES


def mixed_note(target: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What to say of a Hugging Face output whose tensors keep dtypes that differ."""
    found: dict[str, list[str]] = {}
    for name, tensor in target.items():
        if dtypes.is_float(tensor.dtype):
            found.setdefault(str(tensor.dtype), []).append(name)
    if len(found) < 2:
        return ()
    told = ", ".join(f"{len(names)} in {dtype} ({names[0]})" for dtype, names in found.items())
    return (
        f"the tensors keep the dtypes of their sources, which differ: {told}; --dtype stores all "
        "in one",
    )
