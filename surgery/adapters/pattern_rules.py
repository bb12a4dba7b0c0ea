"""Which key of ``rank_pattern`` and ``alpha_pattern`` a module goes by: PEFT's rules, by version.

Sources: ``LoraModel._create_and_replace`` and ``get_pattern_key`` of PEFT 0.6.2 to 0.21.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PatternRule:
    """The rule of PEFT from one version to the next rule's.

    Attributes:
        since: The version, as numbers.
        expression: The regular expression of ``{key}`` that a module's path has to match.
        shared: The first key that matches, of both patterns behind one another, is looked up in
            both; else each pattern has a first one of its own.
    """

    since: tuple[int, int]
    expression: str
    shared: bool

    def of(self, key: str) -> str:
        """The regular expression of ``key``, which may have braces."""
        return self.expression.replace("{key}", key)


RULES = (
    PatternRule((0, 0), r".*\.{key}$", shared=True),
    PatternRule((0, 14), r".*\.{key}$", shared=False),
    PatternRule((0, 15), r"(.*\.)?({key})$", shared=False),
)
"""In the order of their versions."""

_FIRST_SEEN = {
    **dict.fromkeys(("eva_config", "exclude_modules", "lora_bias"), (0, 14)),
    **dict.fromkeys(("corda_config", "trainable_token_indices"), (0, 15)),
    **dict.fromkeys(("qalora_group_size", "use_qalora"), (0, 16)),
    "target_parameters": (0, 17),
}
"""Keys of an adapter_config.json that no earlier version wrote; before 0.18 none wrote its own."""


def rules_of(version: tuple[int, int] | None, keys: Iterable[str]) -> tuple[PatternRule, ...]:
    """The rules that an adapter may have been trained by; the one of ``version``, if it is known.

    Args:
        version: ``peft_version``; None where the file does not say it.
        keys: Of its adapter_config.json; they tell which versions it is not of.
    """
    oldest = version or max((_FIRST_SEEN.get(key, (0, 0)) for key in keys), default=(0, 0))
    begun = [rule for rule in RULES if rule.since <= oldest]
    return (begun[-1],) if version else (begun[-1], *RULES[len(begun) :])
