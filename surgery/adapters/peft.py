"""Read a PEFT adapter directory: factors, magnitudes, saved modules, each by its weight's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.readers.provenance import same_as
from gemma_convert.convert.tensor import Tensor
from gemma_convert.surgery.adapters.adapter import Adapter, Pair
from gemma_convert.surgery.adapters.forms import PEFT, PEFT_PARAMETER, PEFT_UNTIL_018, Form
from gemma_convert.surgery.adapters.peft_config import (
    PeftConfig,
    read_peft_config,
    settled,
    sorted_note,
)
from gemma_convert.surgery.adapters.peft_keys import FACTORS, Key, read_key, weight_name
from gemma_convert.surgery.trained_on import from_metadata

_PARAMETERS = ("gate_up_proj", "down_proj")
"""Gemma 4's expert parameters, in the order of their module: PEFT wraps the first one innermost."""

_SCALED = 0, 18
"""The version of PEFT that first multiplied an embedding's delta by the embedding's own factor."""

_STACKED = 0, 19
"""The version of PEFT that first asked which axis of a stack of experts is the input."""


@dataclass
class _Found:
    """The tensors of an adapter file, sorted by what they are."""

    factors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    unused: list[tuple[Tensor, str]] = field(default_factory=list)


def read_peft(checkpoint: Checkpoint) -> Adapter:
    """The adapter that a PEFT directory holds.

    Args:
        checkpoint: As opened, with ``adapter_config`` in its metadata.

    Raises:
        AdapterError: If config and factors disagree, or it is not plain LoRA or DoRA.
    """
    config = read_peft_config(checkpoint.metadata["adapter_config"], checkpoint.source)
    found = _sort(checkpoint, config)
    ranks = _ranks(found)
    config = settled(config, ranks)
    pairs = {
        name: _pair(config, found.modules[name], name, sides)
        for name, sides in found.factors.items()
    }
    scales = {name: config.scale(found.modules[name], pair.rank) for name, pair in pairs.items()}
    return Adapter(
        pairs,
        scales,
        Spelling(HF, ""),
        checkpoint.source,
        kind="PEFT DoRA" if config.dora else "PEFT LoRA",
        saved=found.saved,
        copies=frozenset(found.copies),
        ties_head=config.ties_head,
        notes=sorted_note(config, ranks),
        unused=tuple(found.unused),
        same_as=same_as(checkpoint.metadata),
        trained_on=from_metadata(checkpoint.metadata),
    )


def _ranks(found: _Found) -> dict[str, int]:
    """The rank of each module that is one matrix, as A says it."""
    first = {name: sides["a"].shape for name, sides in found.factors.items() if "a" in sides}
    return {
        found.modules[name]: shape[0]
        for name, shape in first.items()
        if shape and not _is_stack(name)
    }


def _is_stack(name: str) -> bool:
    return ".experts." in f".{name}."


def _sort(checkpoint: Checkpoint, config: PeftConfig) -> _Found:
    found = _Found()
    for text, tensor in checkpoint.items():
        key = read_key(text)
        found.names |= {key.adapter} if key.adapter else set()
        if key.factor == "original":
            found.unused.append((tensor, "the base's own value, beside the adapter's"))
            continue
        if key.factor == "bias":
            raise AdapterError(
                f"{config.source}: {text}: B has a bias, and Gemma's projections have none",
                "merge it with PEFT itself",
            )
        if key.factor == "saved":
            _require_no_factor(key, text, config)
            name = _once(found.saved, weight_name(key.module), text, config.source)
            found.saved[name] = tensor
            if key.copied or _is_copied(key.module, config):
                found.copies.add(name)
            continue
        module, name = _weight(key, config)
        if "lora_embedding_" in text:
            _require_known_embedding(text, name, config)
        sides = found.factors.setdefault(name, {})
        sides[_once(sides, key.factor, text, config.source)] = tensor
        found.modules[name] = module
    if len(found.names) > 1:
        raise AdapterError(
            f"{config.source}: it holds several adapters: {', '.join(sorted(found.names))}",
            "save each of them alone",
        )
    return found


def _require_no_factor(key: Key, text: str, config: PeftConfig) -> None:
    """Refuse what is called a factor and is none of LoRA's, rather than take it for a weight."""
    found = next((word for word in key.module.split(".") if word.startswith("lora_")), None)
    if found is not None:
        raise AdapterError(
            f"{config.source}: {text}: {found} is no factor of LoRA in PEFT, which are "
            f"{', '.join(FACTORS)}",
            "merge it with the library that made it, or save it with PEFT's save_pretrained",
        )


def _require_known_embedding(text: str, name: str, config: PeftConfig) -> None:
    """Refuse factors of an embedding whose axes, or whose scale in training, are not known."""
    if not name.startswith("embed_tokens"):
        raise AdapterError(
            f"{config.source}: {text}: factors of an embedding outside the text model",
            "merge it with PEFT itself",
        )
    if config.version is None or config.version < _SCALED:
        raise AdapterError(
            f"{config.source}: {text}: PEFT before 0.18 did not multiply what it added to an "
            "embedding by the root of the width, as Gemma's embedding is, and adapter_config.json "
            "names no later version",
            'if a later one trained it, or Gemma 1 or 2 in transformers 4, write "peft_version": '
            '"0.18.0" into it; else divide lora_embedding_B by that root first',
        )


def _once(taken: Mapping[str, Tensor], name: str, text: str, source: str) -> str:
    if name in taken:
        raise AdapterError(
            f"{source}: {text}: another tensor of the file stands for the same weight",
            "save the adapter alone, with PEFT's save_pretrained",
        )
    return name


def _is_copied(path: str, config: PeftConfig) -> bool:
    """Whether the weight at ``path`` lies in a module that ``modules_to_save`` means.

    PEFT goes by the end of a module's path, in the middle of a word too: ``norm`` means every norm.
    """
    modules = [path[:place] for place, letter in enumerate(path) if letter == "."]
    return any(module.endswith(config.copied) for module in modules)


def _weight(key: Key, config: PeftConfig) -> tuple[str, str]:
    """The path that PEFT matches patterns against, and the weight's name."""
    if key.module.rpartition(".")[2] != "experts":
        return key.module, weight_name(f"{key.module}.weight")
    wrapped = [
        name
        for name in _PARAMETERS
        if any(f".{key.module}.{name}".endswith(f".{target}") for target in config.parameters)
    ]
    if key.depth >= len(wrapped):
        raise AdapterError(
            f"{config.source}: {key.module}: factors of {key.depth + 1} parameters, but "
            f"adapter_config.json: target_parameters names {len(wrapped)}: {', '.join(wrapped)}",
            "factors and config belong to different runs",
        )
    path = f"{key.module}.{wrapped[len(wrapped) - 1 - key.depth]}"
    return path, weight_name(path)


def _pair(config: PeftConfig, module: str, name: str, sides: Mapping[str, Tensor]) -> Pair:
    for side in ("a", "b", *(("magnitude",) if config.dora else ())):
        if side not in sides:
            raise AdapterError(
                f"{config.source}: {module}: its {side.upper() if len(side) == 1 else side} is "
                "missing, the others are there",
                "the adapter is incomplete: download it again",
            )
    a, b, ranks = sides["a"], sides["b"], config.ranks_of(module)
    if len(a.shape) > 2 and len(b.shape) > 2:
        raise AdapterError(
            f"{config.source}: {module}: A {list(a.shape)} and B {list(b.shape)} are factors of a "
            "convolution, expected matrices",
            "merge it with PEFT itself",
        )
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"{config.source}: {module}: the factors disagree on the rank: A {list(a.shape)} "
            f"begins with r, B {list(b.shape)} ends in r",
            "they belong to different runs",
        )
    stacked = _is_stack(name)
    rank = a.shape[0] if a.shape[0] in ranks and not stacked else ranks[0]
    experts = a.shape[0] // rank if stacked else 1
    if not experts or experts * rank != a.shape[0]:
        raise AdapterError(
            f"{config.source}: {module}: the factors have rank {a.shape[0]}, adapter_config.json "
            f"says {rank}" + (" for each expert" if stacked else ""),
            "factors and config belong to different runs",
        )
    magnitude = sides.get("magnitude")
    if magnitude is not None and not config.dora:
        raise AdapterError(
            f"{config.source}: {module}: it has a magnitude, but adapter_config.json says no "
            "use_dora",
            "factors and config belong to different runs",
        )
    return Pair(a, b, _forms(config, module, stacked), experts, magnitude)


def _forms(config: PeftConfig, module: str, stacked: bool) -> tuple[Form, ...]:
    """How the factors lie; for experts of an unknown version of PEFT, the shapes must tell."""
    if not stacked:
        return (PEFT_PARAMETER if config.targets_weight(module) else PEFT,)
    if config.version is None:
        return (PEFT, PEFT_UNTIL_018)
    return (PEFT,) if config.version >= _STACKED else (PEFT_UNTIL_018,)
