"""The vision and audio parts of a model: read from config.json, found in a checkpoint.

A tower is a small model of its own, with a table of rows and a number of layers. Its names stand
beside the text model's, so its spelling follows from theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemma_convert.convert.network import TowerNetwork
from gemma_convert.convert.rows import Family, Layer, Tower
from gemma_convert.convert.sizes import layer_count


def read_towers(
    config: Mapping[str, Any], family: Family, text_size: int
) -> tuple[TowerNetwork, ...]:
    """The towers that ``config`` describes and whose rows are known."""
    found = []
    for tower in family.towers:
        own = config.get(f"{tower.part}_config")
        if isinstance(own, Mapping) and own.get("model_type", tower.model_types[0]) in (
            tower.model_types
        ):
            found.append(_tower(tower, {**tower.defaults, **own}, text_size))
    return tuple(found)


def _tower(tower: Tower, values: Mapping[str, Any], text_size: int) -> TowerNetwork:
    common = Layer(
        index=-1,
        is_global=False,
        value_is_key=False,
        shares_kv=False,
        is_moe=False,
        has_ple=False,
        query_scale=1.0,
        sizes=tower.sizes(values, text_size),
        flags=frozenset(key for key in tower.flags if values.get(key)),
    )
    count = layer_count(values)
    return TowerNetwork(tower, tuple(replace(common, index=i) for i in range(count)), common)
