"""The vision and audio parts of a model: read from config.json, found in a checkpoint.

A tower is a small model of its own, with a table of rows and a number of layers. Its names stand
beside the text model's, so its spelling follows from theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.layouts import HF, IN_MEMORY, Layout, Spelling
from gemma_convert.convert.network import Network
from gemma_convert.convert.rows import Family, Layer, Tower
from gemma_convert.convert.sizes import layer_count
from gemma_convert.convert.tensor import Tensor


@dataclass(frozen=True)
class TowerConfig:
    """What config.json says of a tower. Its sizes are read when they are needed, not before.

    Attributes:
        tower: Its rows.
        values: Its own config, with what transformers assumes where that says nothing.
        text_size: Hidden size of the text model.
        origin: As of `Network`.
    """

    tower: Tower
    values: Mapping[str, Any]
    text_size: int
    origin: str = "config.json"

    def network(self) -> Network:
        """The tower's dimensions.

        Raises:
            ConfigError: If one is missing or senseless.
        """
        common = Layer(
            index=-1,
            is_global=False,
            value_is_key=False,
            shares_kv=False,
            is_moe=False,
            has_ple=False,
            query_scale=1.0,
            sizes=self.tower.sizes(self.values, self.text_size),
            flags=frozenset(key for key in self.tower.flags if self.values.get(key)),
        )
        layers = tuple(replace(common, index=i) for i in range(layer_count(self.values)))
        return Network(self.tower, layers, common, origin=self.origin)


def read_towers(
    config: Mapping[str, Any], family: Family, text_size: int
) -> tuple[TowerConfig, ...]:
    """The towers that ``config`` describes, as far as their rows are known."""
    found = []
    for tower in family.towers:
        own = config.get(f"{tower.part}_config")
        if isinstance(own, Mapping) and own.get("model_type", tower.model_types[0]) in (
            tower.model_types
        ):
            found.append(TowerConfig(tower, {**tower.defaults, **own}, text_size))
    return tuple(found)


@dataclass(frozen=True)
class Found:
    """A tower in a checkpoint.

    Attributes:
        config: What config.json says of it.
        tensors: Its tensors, named as its rows do behind the spelling's prefix.
        spelling: How they are spelled.
        shortened: Whether they began as transformers 5 saves them; see `Tower.shortened`.
    """

    config: TowerConfig
    tensors: Checkpoint
    spelling: Spelling
    shortened: bool = False

    @property
    def tower(self) -> Tower:
        """Its rows."""
        return self.config.tower


def find_towers(
    checkpoint: Checkpoint, configs: Iterable[TowerConfig], text: Spelling
) -> tuple[Found, ...]:
    """The towers of which ``checkpoint`` has tensors.

    Args:
        checkpoint: Tensors named as the templates write them, the text model's among them.
        configs: The towers of the model.
        text: How the text model is spelled.
    """
    spellings = [Spelling(text.layout, prefix) for prefix in outer_prefixes(text)]
    found = [
        max(
            (_under(checkpoint, config, spelling) for spelling in spellings),
            key=lambda tower: len(tower.tensors),
        )
        for config in configs
    ]
    return tuple(tower for tower in found if tower.tensors)


def _under(checkpoint: Checkpoint, config: TowerConfig, spelling: Spelling) -> Found:
    """The tensors that have a tower's names behind one prefix."""
    tower, layout = config.tower, spelling.layout
    tensors: dict[str, Tensor] = {}
    shortened = False
    for name, tensor in checkpoint.items():
        if name.startswith(spelling.prefix):
            short = name.removeprefix(spelling.prefix)
            written = lengthened(short, tower, layout)
            if any(True for _ in tower.named(written, layout)):
                tensors[spelling.prefix + written] = tensor
                shortened |= written != short
    return Found(config, checkpoint.replace(tensors=tensors), spelling, shortened)


def outer_prefixes(text: Spelling) -> tuple[str, ...]:
    """What may stand before the names of towers beside such a text model, the usual first."""
    if text.layout is not HF:
        return (text.prefix,)
    return ("model.", "") if text.prefix == IN_MEMORY else ("", "model.")


def beside(text: Spelling) -> Spelling:
    """How towers are spelled beside such a text model."""
    return Spelling(text.layout, outer_prefixes(text)[0])


def lengthened(name: str, tower: Tower, layout: Layout) -> str:
    """``name`` as the rows have it, where transformers 5 saved it shorter; see `Tower`."""
    if layout is HF and tower.shortened is not None:
        long, short = tower.shortened
        if name.startswith(short) and not name.startswith(long):
            return long + name.removeprefix(short)
    return name


def shortened(name: str, tower: Tower, spelling: Spelling) -> str:
    """The opposite of `lengthened`, for a name with its prefix."""
    if spelling.layout is HF and tower.shortened is not None:
        long, short = (spelling.prefix + beginning for beginning in tower.shortened)
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
