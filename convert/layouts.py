"""The layouts: one ecosystem's spelling of the parameters of a model.

A family's rows give names relative to the text model. What stands before them differs between
wrappers of one layout, so a layout lists its prefixes, the most specific first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One ecosystem's spelling of parameter names and axis orders.

    Attributes:
        name: As typed on the command line.
        prefixes: What may stand before a text parameter's name.
        default_prefix: The one written when no base says otherwise.
    """

    name: str
    prefixes: tuple[str, ...]
    default_prefix: str


@dataclass(frozen=True)
class Spelling:
    """A layout with one of its prefixes."""

    layout: Layout
    prefix: str

    def __str__(self) -> str:
        return f"{self.layout.name} ({self.prefix}*)" if self.prefix else self.layout.name


HF = Layout(
    "hf",
    (
        "model.language_model.",  # transformers >= 4.52 in memory; Gemma 4 on the Hub
        "language_model.model.",  # Gemma 3 4b and larger on the Hub
        "model.",  # text-only models
    ),
    "model.",
)
TUNIX = Layout("tunix", ("",), "")

LAYOUTS = {layout.name: layout for layout in (HF, TUNIX)}
