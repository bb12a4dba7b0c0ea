"""How Qwix and PEFT lay out the two factors of a row, as axis patterns.

``W' = W + scale * A.B``: A holds the contracted axes and the rank r, B holds r and the others. For
a weight ``(n h) d`` with inputs d:

    Qwix   A  d r             B  r n h          each axis a dimension, in the order of the weight
           A  d r             B  r (n h)        matrices, where the product is a dot_general
    PEFT   A  r d             B  (n h) r        matrices

Experts are several matrices in one array, ``e (c m) d``. PEFT (``lora.ParamWrapper``) then has
``A  (e r) d`` and ``B  (c m) (r e)``; note the orders. Until its 0.18 it took the second axis of
the array for the inputs whatever they were: ``A  (e r) (c m)`` and ``B  d (r e)``. It still does
of a matrix that ``target_parameters`` names: an embedding ``v d``, whose ids are inputs, then has
``A  r d`` and ``B  v r``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemma_convert.convert import pattern as patterns
from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.pattern import Pattern
from gemma_convert.convert.rows import Row

RANK = "r"
"""The axis that both factors share."""


@dataclass(frozen=True)
class Form:
    """How one ecosystem lays out factors.

    Attributes:
        name: For messages.
        texts: Patterns of A and B of a row, given the row's name for its layout.
        rank_axis: The dimension of A that holds the rank, with the experts where there are some.
    """

    name: str
    texts: Callable[[Row, Layout], tuple[str, str]]
    rank_axis: int

    @property
    def is_qwix(self) -> bool:
        """Whether Qwix makes such factors: those of one product, A with the rank behind."""
        return self.rank_axis == -1

    def patterns(self, row: Row, layout: Layout) -> tuple[Pattern, Pattern]:
        """Axis patterns of A and B for ``row``, whose weight is laid out as in ``layout``."""
        a, b = self.texts(row, layout)
        return patterns.parse(a), patterns.parse(b)


def _qwix(row: Row, layout: Layout) -> tuple[str, str]:
    inputs, outputs = row.factor_axes(layout)
    return " ".join((*inputs, RANK)), " ".join((RANK, *outputs))


def _qwix_matrices(row: Row, layout: Layout) -> tuple[str, str]:
    inputs, outputs = row.factor_axes(layout)
    return f"{_text([inputs])} {RANK}", f"{RANK} {_text([outputs])}"


def _peft(row: Row, layout: Layout) -> tuple[str, str]:
    inputs, outputs = _sides(row, layout)
    outer, inner = _rank(row)
    return f"{outer} {inputs}", f"{outputs} {inner}"


def _peft_until_018(row: Row, layout: Layout) -> tuple[str, str]:
    inputs, outputs = _sides(row, layout)
    outer, inner = _rank(row)
    return f"{outer} {outputs}", f"{inputs} {inner}"


def _peft_parameter(row: Row, layout: Layout) -> tuple[str, str]:
    return _peft_until_018(row, layout) if row.lookup else _peft(row, layout)


def _sides(row: Row, layout: Layout) -> tuple[str, str]:
    """The dimensions of the inputs and those of the outputs, as the weight composes them."""
    groups = row.cell(layout).pattern.groups
    inputs = [group for group in groups if set(group) <= set(row.inputs)]
    outputs = [group for group in groups if not set(group) & {*row.inputs, *row.stacked}]
    return _text(inputs), _text(outputs)


def _rank(row: Row) -> tuple[str, str]:
    """The rank's dimension in A and in B."""
    if not row.stacked:
        return RANK, RANK
    stacked = " ".join(row.stacked)
    return f"({stacked} {RANK})", f"({RANK} {stacked})"


def _text(groups: Sequence[tuple[str, ...]]) -> str:
    return " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in groups)


QWIX = Form("Qwix", _qwix, rank_axis=-1)
QWIX_MATRICES = Form("Qwix", _qwix_matrices, rank_axis=-1)
PEFT = Form("PEFT", _peft, rank_axis=0)
PEFT_UNTIL_018 = Form("PEFT until 0.18", _peft_until_018, rank_axis=0)
PEFT_PARAMETER = Form("PEFT's target_parameters", _peft_parameter, rank_axis=0)
