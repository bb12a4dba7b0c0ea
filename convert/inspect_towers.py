"""Which vision and audio towers a checkpoint holds, told from headers alone."""

from __future__ import annotations

from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.fit import disagreements
from gemma_convert.convert.layouts import Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.registry import families, recognise
from gemma_convert.convert.towers import Found, TowerConfig, find_towers


def towers(weights: Checkpoint, spelling: Spelling, problems: list[str]) -> list[dict[str, Any]]:
    """Describe the towers of ``weights`` as plain data.

    Args:
        weights: Weights alone. With a config.json it says which towers there may be and of what
            sizes; without one, names say which they are.
        spelling: How the text model is spelled.
        problems: Where tensors and config disagree is added here.
    """
    named, _ = recognise(weights, spelling.layout)
    if not weights.config:
        return [_entry(tower) for tower in _likeliest(find_towers(named, _every(), spelling))]
    try:
        configs = read_model(weights.config, families()).towers
    except ConfigError:
        return []  # said of the text model already
    found = find_towers(named, configs, spelling)
    for tower in found:
        try:
            network = tower.config.network()
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems += disagreements(tower.tensors, network, tower.spelling)
    return [_entry(tower) for tower in found]


def _every() -> list[TowerConfig]:
    """All towers known, of no size."""
    known = {tower.name: tower for family in families().values() for tower in family.towers}
    return [TowerConfig(tower, tower.defaults, 0) for tower in known.values()]


def _likeliest(found: tuple[Found, ...]) -> list[Found]:
    """For each part the tower that explains most names: some have names in common."""
    best: dict[str, Found] = {}
    for tower in found:
        other = best.setdefault(tower.tower.part, tower)
        if len(tower.tensors) > len(other.tensors):
            best[tower.tower.part] = tower
    return list(best.values())


def _entry(tower: Found) -> dict[str, Any]:
    return {
        "part": tower.tower.part,
        "name": tower.tower.name,
        "layers": _layers(tower),
        "tensors": len(tower.tensors),
        "parameters": sum(tensor.size for tensor in tower.tensors.values()),
    }


def _layers(tower: Found) -> int:
    """How many layers the names tell of, or the arrays that hold several."""
    layout, seen = tower.spelling.layout, 0
    stacking = tower.tower.stacks.get(layout.name)
    for name, tensor in tower.tensors.items():
        short = name.removeprefix(tower.spelling.prefix)
        for row, axes in tower.tower.named(short, layout):
            if axes and stacking is not None:
                seen = max(seen, tensor.shape[stacking.axis] if tensor.shape else 0)
            elif row.per_layer:
                seen = max(seen, (row.cell(layout).template.match(short) or {}).get("i", -1) + 1)
    return seen
