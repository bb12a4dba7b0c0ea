"""Values of an adapter that would harm the base or do nothing to it."""

from __future__ import annotations

import numpy as np

from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.tensor import Tensor, blocks
from gemma_convert.surgery.adapters.adapter import Adapter, Pair


def check_values(adapter: Adapter, *, allow_zero: bool = False) -> None:
    """Read every factor once and refuse adapters that would harm or do nothing.

    Args:
        adapter: The adapter.
        allow_zero: Whether a pair may be all zero, as that of a module that was frozen.

    Raises:
        AdapterError: If a factor holds NaN or infinity, or is all zero, or a scale is no float32.
    """
    for name, pair in adapter.pairs.items():
        with np.errstate(over="ignore", under="ignore"):
            scale = np.float32(adapter.scale(name) * adapter.weight)
        if not 0 < abs(scale) < np.inf:
            raise AdapterError(
                f"{adapter.source}: {name}: alpha / r = {adapter.scale(name):g} is no float32",
                "pass the alpha of the training run",
            )
        for side, factor in pair.factors().items():
            _check(adapter.source, f"{name}_lora_{side}", factor)
        if not allow_zero and pair.magnitude is None:
            _check_nonzero(adapter.source, name, pair)
    for name, tensor in adapter.saved.items():
        _check(adapter.source, name, tensor)


def _check(source: str, name: str, tensor: Tensor) -> None:
    bad = 0
    for box in blocks(tensor):
        finite = np.isfinite(tensor.read(box).astype(np.float32))
        bad += int(finite.size - finite.sum())
    if bad:
        raise AdapterError(
            f"{source}: {name}: {bad} of {tensor.size} values are NaN or infinite",
            "the run diverged; take an earlier step",
        )


def _check_nonzero(source: str, name: str, pair: Pair) -> None:
    for side, factor in (("a", pair.a), ("b", pair.b)):
        if not any(factor.read(box).any() for box in blocks(factor)):
            raise AdapterError(
                f"{source}: {name}_lora_{side} is all zero: the pair changes nothing",
                "is this the step that was meant? Factors are zero before the first update; "
                "--allow-unchanged accepts modules that were frozen",
            )
