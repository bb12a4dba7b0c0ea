"""LoRA factors in MaxText's own names and in Qwix's there, and what they add, in numpy float64.

From MaxText git e591f30 (``utils/lora_utils.py``: the shapes of ``get_lora_abstract_state``;
``checkpoint_conversion/to_huggingface.py``: matrices with the layers on axis 1 or 0). Kernels and
products are written in MaxText's axes, with the layers where MaxText stacks them, so that nothing
of the package takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import einops
import numpy as np

from gemma_convert.convert.tensor import Array

Style = Literal["native", "qwix-1", "qwix-0"]

RANKS = {"query": 2, "key": 3, "value": 5, "out": 4, "wi_0": 2, "wi_1": 3, "wo": 5}
ATTENTION = ("query", "key", "value", "out")
ALPHA = 7.0

_INPUTS = {"out": "n h"}
_AXES = {"query": "d n h", "key": "d n h", "value": "d n h", "out": "n h d"}


class Lora(NamedTuple):
    """Factors by their names on the disk, and the deltas of the kernels by theirs."""

    factors: dict[str, Array]
    deltas: dict[str, Array]


def lora(tree: Mapping[str, Array], style: Style, seed: int = 3, lead: str = "") -> Lora:
    """Random factors of the kernels in ``tree``, float32, and ``ALPHA / r * A.B`` in float64."""
    random = np.random.default_rng(seed)
    factors: dict[str, Array] = {}
    deltas: dict[str, Array] = {}
    for name, kernel in tree.items():
        parts = name.split("/")
        module = parts[-2]
        known = ATTENTION if style == "native" else RANKS
        if module not in known or "MoeBlock_0" in parts or parts[-1] != "kernel":
            continue
        axes = _AXES.get(module, "d f").split()
        layers = ["l", "m"][: kernel.ndim - len(axes)]
        inputs = _INPUTS.get(module, "d").split()
        if style == "native" and len(layers) > 1:
            continue  # MaxText refuses kernels of more than four dimensions
        rank = 2 if style == "native" else RANKS[module]
        stored = [axes[0], *layers, *axes[1:]]
        sizes = dict(zip(stored, kernel.shape, strict=True))
        outputs = [axis for axis in axes if axis not in inputs]
        a_axes = [inputs[0], *layers, *inputs[1:], "r"]
        b_axes = ["r", *layers, *outputs]
        a, b = (
            random.normal(size=[{**sizes, "r": rank}[axis] for axis in which]).astype(np.float32)
            for which in (a_axes, b_axes)
        )
        product = np.einsum(
            a.astype(np.float64), _ids(a_axes), b.astype(np.float64), _ids(b_axes), _ids(stored)
        )
        deltas[name] = ALPHA / rank * product
        if style != "native":
            a, b = (
                einops.rearrange(factor, f"{' '.join(old)} -> {_matrices(*new, layers, style)}")
                for factor, old, new in (
                    (a, a_axes, (f"({' '.join(inputs)})", "r")),
                    (b, b_axes, ("r", f"({' '.join(outputs)})")),
                )
            )
        stem = f"{lead}{name}".replace("/", ".").removesuffix(".kernel")
        spelled = "lora_{}.kernel" if style == "native" else "kernel_lora_{}"
        factors |= {f"{stem}.{spelled.format(side)}": f for side, f in (("a", a), ("b", b))}
    return Lora(factors, deltas)


def _matrices(first: str, second: str, layers: list[str], style: Style) -> str:
    stacked = " ".join(layers)
    return f"{first} {stacked} {second}" if style == "qwix-1" else f"{stacked} {first} {second}"


def _ids(axes: list[str]) -> list[int]:
    """Axes as numpy's einsum numbers them."""
    return ["dnhflmr".index(axis) for axis in axes]
