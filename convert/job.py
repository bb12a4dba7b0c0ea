"""A job: a plan, and what it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemma_convert.convert.layouts import Layout
from gemma_convert.convert.model import Model
from gemma_convert.convert.plan import Plan
from gemma_convert.surgery.adapters.adapter import Adapter


@dataclass(frozen=True)
class Job:
    """A plan, and what it was made for.

    Attributes:
        plan: What will be written.
        layout: In which layout.
        model: The dimensions; None where none are needed.
        adapters: The LoRA adapters that are merged.
        merged_before: What earlier runs merged into the same weights: source, weight, digest.
        bases: Where training had quantised the base: the version that is merged onto, and the one
            that it is compared with, if there is one.
        details: What else the ledger keeps, as JSON values.
        summary: What else people are told: rows of a table, label and text.
    """

    plan: Plan
    layout: Layout
    model: Model | None
    adapters: tuple[Adapter, ...] = ()
    merged_before: tuple[Mapping[str, Any], ...] = ()
    bases: tuple[str, str] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    summary: tuple[tuple[str, str], ...] = ()
