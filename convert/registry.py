"""The registry: which families are known, and which layout a set of names is in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError, LayoutError
from gemma_convert.convert.layouts import LAYOUTS, Layout, Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.rows import Family
from gemma_convert.convert.tensor import Tensor
from gemma_convert.convert.towers import lengthened, outer_prefixes

ENTRY_POINTS = "gemma_convert.families"
"""Group of the entry points by which other packages register families."""


@cache
def families() -> Mapping[str, Family]:
    """The families known, by name: ours, then those that installed packages register.

    Raises:
        ConfigError: If an entry point is not a `Family`, or takes a name that is taken.
    """
    from gemma_convert.convert.families import gemma1, gemma2, gemma3, gemma4

    found = {module.FAMILY.name: module.FAMILY for module in (gemma1, gemma2, gemma3, gemma4)}
    for entry in entry_points(group=ENTRY_POINTS):
        family = entry.load()
        if not isinstance(family, Family) or family.name in found:
            raise ConfigError(
                f"entry point {entry.name} = {entry.value} is not a family of a new name",
                "let it name a gemma_convert.convert.rows.Family, or uninstall its package",
            )
        found[family.name] = family
    return found


def named_model(name: str) -> Model:
    """The public model of that name, such as ``gemma-4-31b``, or of that repository of Google's.

    Args:
        name: Case does not matter; ``google/gemma-3-270m-it`` is ``gemma-3-270m``, as a model's
            tuned (``-it``) and pretrained (``-pt``) weights have its sizes.

    Raises:
        ConfigError: If it is not known.
    """
    found = _PUBLISHED.fullmatch(name.lower())
    short = found["model"] if found else ""
    for family in families().values():
        for known in (name.lower(), short):
            if known in family.models:
                return _named(read_model(family.config(known), families()), name)
    known = ", ".join(model for family in families().values() for model in family.models)
    raise ConfigError(f"no public model {name!r} is known", f"known: {known}")


_PUBLISHED = re.compile(r"(?:google/)?(?P<model>[^/]+?)(?:-(?:it|pt))?(?:@[^/]+)?")
"""What Google calls a repository of a model, and perhaps a revision of it."""


def _named(model: Model, name: str) -> Model:
    """``model``, its origin for messages the option that named it."""
    origin = f"--model {name}"
    towers = tuple(replace(tower, origin=origin) for tower in model.towers)
    return replace(model, origin=origin, towers=towers)


@dataclass(frozen=True)
class Evidence:
    """How well a spelling explains a set of names.

    Attributes:
        spelling: The spelling.
        matched: How many of the names it explains.
        total: How many there are.
        example: One that it explains.
        fitting: How many of those have as many axes as it says.
    """

    spelling: Spelling
    matched: int
    total: int
    example: str
    fitting: int = 0

    def __str__(self) -> str:
        return f"{self.matched} of {self.total} names, such as {self.example}"


def explain(
    tensors: Mapping[str, Tensor], layouts: Iterable[Layout] = tuple(LAYOUTS.values())
) -> list[Evidence]:
    """Every spelling that explains some of the names, the one that explains most first.

    Args:
        tensors: The tensors of one checkpoint by name.
        layouts: The layouts to try.
    """
    found: list[Evidence] = []
    for layout in layouts:
        for prefix in layout.prefixes:
            spelling = Spelling(layout, prefix)
            ranks = {name: _ranks(normal(name, layout), spelling) for name in tensors}
            matched = [name for name, expected in ranks.items() if expected]
            fitting = [name for name in matched if len(tensors[name].shape) in ranks[name]]
            if matched:
                example = matched[len(matched) // 2]
                found.append(Evidence(spelling, len(matched), len(tensors), example, len(fitting)))
    return sorted(found, key=lambda evidence: (-evidence.matched, -evidence.fitting))


def detect(tensors: Mapping[str, Tensor], where: str, layout: Layout | None = None) -> Spelling:
    """The spelling that tensors are in.

    Args:
        tensors: The tensors of one checkpoint by name.
        where: The checkpoint, for the message.
        layout: The layout they are said to be in.

    Raises:
        LayoutError: If no known layout, or not that one, explains any of them.
    """
    found = explain(tensors, LAYOUTS.values() if layout is None else (layout,))
    if not found:
        example = f"such as {next(iter(tensors))}" if tensors else "there are none"
        said = "no known layout" if layout is None else f"nothing of layout {layout.name}"
        raise LayoutError(
            f"{where}: the tensor names fit {said} ({example})",
            f"known: {', '.join(LAYOUTS)}; see `gemma-convert inspect {where}`",
        )
    return found[0].spelling


def recognise(checkpoint: Checkpoint, layout: Layout | None = None) -> tuple[Checkpoint, Spelling]:
    """The spelling of a checkpoint, and the checkpoint with names as the templates write them.

    Args:
        checkpoint: Weights alone.
        layout: The layout they are in; told from the names if None.

    Raises:
        LayoutError: If no known layout explains the names.
    """
    spelling = detect(checkpoint, checkpoint.source, layout)
    tensors = {_as_written(name, t, spelling): t for name, t in checkpoint.items()}
    return checkpoint.replace(tensors=tensors), spelling


def names_text_parameter(name: str, spelling: Spelling) -> bool:
    """Whether the text model of some family has a parameter that ``spelling`` gives this name."""
    return bool(_text_ranks(_any_layer(normal(name, spelling.layout)), spelling))


def normal(name: str, layout: Layout) -> str:
    """``name`` with the layout's separator between its keys, begun as the templates do."""
    name = name if layout.separator == "." else name.replace(".", layout.separator)
    for alias, written in layout.aliases.items():
        if name.startswith(alias):
            return written + name.removeprefix(alias)
    return name


def _as_written(name: str, tensor: Tensor, spelling: Spelling) -> str:
    """The name that a template gives this tensor, where an optional last key makes several."""
    layout = spelling.layout
    name = normal(name, layout)
    leaf = layout.separator + layout.optional_leaf
    names = [name, name.removesuffix(leaf), name + leaf] if layout.optional_leaf else [name]
    for candidate in names:
        if len(tensor.shape) in _ranks(candidate, spelling):
            return candidate
    return name


_LAYER = re.compile(r"((?:layer|block)s?[._/]|type_)(?:0|[1-9][0-9]{0,8})(?=[._/])")


def _ranks(name: str, spelling: Spelling) -> frozenset[int]:
    """How many axes a tensor called ``name`` may have, by the cells of all families."""
    name = _any_layer(name)
    return _text_ranks(name, spelling) or frozenset().union(
        *(
            _tower_ranks_in(name.removeprefix(prefix), spelling.layout)
            for prefix in outer_prefixes(spelling)
            if name.startswith(prefix)
        )
    )


def _any_layer(name: str) -> str:
    """``name`` in layer 0, so that names which differ in the layer are matched once."""
    return _LAYER.sub(r"\g<1>0", name, count=1)


def _text_ranks(name: str, spelling: Spelling) -> frozenset[int]:
    if not name.startswith(spelling.prefix):
        return frozenset()
    return _ranks_in(name.removeprefix(spelling.prefix), spelling.layout)


@cache
def _ranks_in(name: str, layout: Layout) -> frozenset[int]:
    return frozenset(
        len(row.cell(layout).pattern.groups) + axes
        for family in families().values()
        for row, axes in family.named(name, layout)
    )


@cache
def _tower_ranks_in(name: str, layout: Layout) -> frozenset[int]:
    return frozenset(
        len(row.cell(layout).pattern.groups) + axes
        for family in families().values()
        for tower in family.towers
        for row, axes in tower.named(lengthened(name, tower, layout), layout)
    )
