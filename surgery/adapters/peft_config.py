"""``adapter_config.json`` of PEFT's LoRA: scales and ranks, and what is refused by name.

Sources: ``LoraConfig`` of PEFT 0.7 to 0.21.2. Its keys grew from 20 to 45; the key sets of older
versions are subsets but for runtime ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from typing import Any

from gemma_convert.convert.errors import AdapterError
from gemma_convert.surgery.adapters.pattern_rules import PatternRule, rules_of
from gemma_convert.surgery.adapters.patterns import check_pattern, matches

_NO_MATHS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
        *("revision", "task_type", "runtime_config"),
        # which modules have factors: the tensors tell
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # training only
        *("lora_dropout", "velora_config", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "megatron_config", "megatron_core", "qalora_group_size"),
        # of modules that store (in, out); PEFT itself turns it off for linear layers
        "fan_in_fan_out",
        "bias",  # Gemma's text models have none; those of towers are in the file, and replaced
    }
)
_HONOURED = frozenset(
    {
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
        *("init_lora_weights", "modules_to_save", "target_parameters", "ensure_weight_tying"),
    }
)
_REFUSED = {
    "layer_replication": "layers are repeated, each with factors of its own",
    "lora_bias": "B has a bias, and Gemma's projections have none to add it to",
    "alora_invocation_tokens": "the adapter acts on some tokens only (aLoRA)",
    "use_qalora": "inputs are pooled before A (QA-LoRA)",
    "arrow_config": "a router chooses among adapters for each token (Arrow)",
    "use_bdlora": "factors are block-diagonal (BD-LoRA)",
    "kasa_config": "the base's own small singular values are removed (KaSA)",
    "monteclora_config": "the factors are sampled (MonteCLoRA)",
    "trainable_token_indices": "single rows of the embedding are replaced",
}
"""Keys that change what an adapter means, each with how."""

_MOVED_BASES = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Values of ``init_lora_weights`` under which PEFT changed the base before training."""

_OWN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Those that began with other factors, and left the base as it was."""


@dataclass(frozen=True)
class PeftConfig:
    """What an adapter_config.json says, checked.

    Attributes:
        source: The adapter, for messages.
        rank: ``r``.
        alpha: ``lora_alpha``.
        ranks: ``rank_pattern``.
        alphas: ``alpha_pattern``.
        rank_stabilised: ``use_rslora``: the scale is alpha / sqrt(r).
        dora: ``use_dora``.
        copied: ``modules_to_save``.
        parameters: ``target_parameters``.
        ties_head: ``ensure_weight_tying``.
        version: ``peft_version`` as numbers; None before PEFT wrote it.
        rules: By which the patterns may be meant; the last one counts.
    """

    source: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rank_stabilised: bool
    dora: bool
    copied: tuple[str, ...]
    parameters: tuple[str, ...]
    ties_head: bool
    version: tuple[int, int] | None
    rules: tuple[PatternRule, ...]

    def ranks_of(self, module: str) -> list[int]:
        """The rank of ``module``, a path as PEFT sees it, by each key of its pattern that fits.

        The first is what PEFT takes when it loads the file; it sorts the keys when it saves, so in
        training it may have been another.
        """
        return [self.ranks.get(key, self.rank) for key in self._keys(self.ranks, module)]

    def alphas_of(self, module: str, rank: int) -> list[float]:
        """The alpha of ``module``, whose factors have ``rank``, by each key that fits."""
        keys = self._keys(self.alphas, module)
        if self.rules[-1].shared:
            keys = [key for key in keys if self.ranks.get(key, self.rank) == rank] or keys
        return [self.alphas.get(key, self.alpha) for key in keys]

    def scale(self, module: str, rank: int) -> float:
        """What A.B is multiplied by in ``module``, whose factors have ``rank``."""
        alpha = self.alphas_of(module, rank)[0]
        return alpha / (sqrt(rank) if self.rank_stabilised else rank)

    def _keys(self, patterns: Mapping[str, float], module: str) -> list[str]:
        """The keys of ``patterns`` that ``module`` may go by; itself where none fits."""
        rule = self.rules[-1]
        # of a target parameter PEFT matches the whole name
        path = f"{module}.weight" if self.targets_weight(module) else module
        ordered = (self.ranks, self.alphas) if rule.shared else (patterns,)
        found = (matches(keys, rule, path, self.source) for keys in ordered)
        return next(filter(None, found), [path])

    def targets_weight(self, module: str) -> bool:
        """Whether the weight of ``module`` is a target parameter."""
        return any(f".{module}.weight".endswith(f".{target}") for target in self.parameters)


def settled(config: PeftConfig, ranks: Mapping[str, int]) -> PeftConfig:
    """``config`` with the one rule of patterns that the factors were made by.

    Args:
        config: As read; where it does not say its version, several rules may come into question.
        ranks: Module to the rank of its factors.

    Raises:
        AdapterError: If the ranks leave several, and these give a module different alphas.
    """
    known = [replace(config, rules=(rule,)) for rule in config.rules]
    fits = [one for one in known if all(rank in one.ranks_of(m) for m, rank in ranks.items())]
    for module, rank in ranks.items() if len(fits) > 1 else ():
        for older, newer in pairwise(fits):
            before, since = (one.alphas_of(module, rank)[0] for one in (older, newer))
            if before != since:
                version = ".".join(map(str, newer.rules[0].since))
                raise AdapterError(
                    f"{config.source}: {module}: by alpha_pattern its alpha is {before:g} in PEFT "
                    f"before {version} and {since:g} since, and adapter_config.json does not say "
                    "which version trained it",
                    'write that into it, such as "peft_version": "0.13.2"',
                )
    return fits[-1] if fits else known[-1]


def sorted_note(config: PeftConfig, ranks: Mapping[str, int]) -> tuple[str, ...]:
    """What a user should know where several keys fit a module and say different alphas."""
    alphas = {module: config.alphas_of(module, rank) for module, rank in ranks.items()}
    several = [module for module in alphas if len(set(alphas[module])) > 1]
    if not several:
        return ()
    said = alphas[several[0]]
    more = f" (and so for {len(several) - 1} more)" if len(several) > 1 else ""
    return (
        f"{config.source}: {several[0]}: alpha_pattern says alpha "
        f"{' and '.join(f'{alpha:g}' for alpha in dict.fromkeys(said))}{more}: PEFT sorts its keys "
        f"when it saves and takes the first when it loads, {said[0]:g}, as is done here; training "
        "may have used another",
    )


def read_peft_config(values: Mapping[str, Any], source: str) -> PeftConfig:
    """Check an adapter_config.json and take from it what bears on the weights.

    Args:
        values: As parsed.
        source: The adapter, for messages.

    Raises:
        AdapterError: If it is not LoRA, a value has the wrong type, or a key changes the adapter's
            meaning in a way that weights alone cannot have. Unknown keys that are set are refused.
    """
    kind = values.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{source}: adapter_config.json: peft_type is {kind!r}, expected 'LORA'",
            "merge it with PEFT itself",
        )
    for key, value in values.items():
        if value in (None, False, {}, []) or key in _NO_MATHS | _HONOURED:
            continue
        raise AdapterError(
            f"{source}: adapter_config.json: {key} = {value!r}: "
            + _REFUSED.get(key, "a key that is not known here and may change the weights"),
            "merge it with PEFT itself",
        )
    _refuse_moved_base(values.get("init_lora_weights"), source)
    checked = _Values(values, source)
    version = _version(values.get("peft_version"))
    return PeftConfig(
        source=source,
        rank=int(checked.number("r", 8)),
        alpha=checked.number("lora_alpha", 8),
        ranks={key: int(value) for key, value in checked.numbers("rank_pattern").items()},
        alphas=checked.numbers("alpha_pattern"),
        rank_stabilised=checked.flag("use_rslora"),
        dora=checked.flag("use_dora"),
        copied=checked.words("modules_to_save"),
        parameters=checked.words("target_parameters"),
        ties_head=checked.flag("ensure_weight_tying"),
        version=version,
        rules=rules_of(version, values),
    )


def _refuse_moved_base(initialised: Any, source: str) -> None:
    if not isinstance(initialised, str) or initialised.lower() in _OWN_STARTS:
        return
    where = f"{source}: adapter_config.json: init_lora_weights = {initialised!r}"
    if initialised.lower().startswith(_MOVED_BASES):
        raise AdapterError(
            f"{where}: PEFT changed the base before it trained the adapter, which fits no other",
            "save it with save_pretrained(path_initial_model_for_weight_conversion=...), which "
            "turns it into plain LoRA",
        )
    raise AdapterError(
        f"{where}: a start that is not known here and may have changed the base",
        "set it to true if the base was left as it is, or merge it with PEFT itself",
    )


def _version(text: Any) -> tuple[int, int] | None:
    found = re.match(r"(\d{1,6})\.(\d{1,6})", text) if isinstance(text, str) else None
    return (int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True)
class _Values:
    """Typed access to the values of a JSON object that is not trusted."""

    values: Mapping[str, Any]
    source: str

    def number(self, key: str, default: float) -> float:
        return self._number(key, self.values.get(key, default))

    def numbers(self, key: str) -> dict[str, float]:
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        for pattern in value:
            check_pattern(pattern, f"{self.source}: adapter_config.json: {key}")
        return {pattern: self._number(key, number) for pattern, number in value.items()}

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value not in (None, True, False):
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def words(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self._wrong(key, value, "a list of names")
        return tuple(value)

    def _number(self, key: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if (
            not good
            or not 0 < value < 1e9
            or (key in ("r", "rank_pattern") and value != int(value))
        ):
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def _wrong(self, key: str, value: Any, expected: str) -> AdapterError:
        return AdapterError(
            f"{self.source}: adapter_config.json: {key} is {value!r}, expected {expected}",
            "download the adapter again",
        )
