"""The regular expressions of ``rank_pattern`` and ``alpha_pattern``, which are not trusted.

Matched by the package regex, which has a time limit; Python's own re has none, and a short pattern
can keep it busy for years.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from gemma_convert.convert.errors import AdapterError
from gemma_convert.surgery.adapters.pattern_rules import RULES, PatternRule

_LONGEST = 1000
_MOST_COPIES = 1000
"""Of what is repeated a number of times: each is a copy in the compiled pattern."""

_SECONDS = 2.0
"""For one pattern and one name; a pattern that is meant takes microseconds."""

_REMEDY = "download the adapter again from a source you trust"


def check_pattern(pattern: str, where: str) -> None:
    """Refuse a pattern that is none, or too long to be meant.

    Args:
        pattern: A key of ``rank_pattern`` or ``alpha_pattern``.
        where: Where it stands, for messages.

    Raises:
        AdapterError: See above.
    """
    import regex

    copies = prod(int(n) for n in regex.findall(r"[{,]([0-9]{1,9})(?=[,}])", pattern) if int(n))
    if len(pattern) > _LONGEST or copies > _MOST_COPIES:
        raise AdapterError(f"{where} has {pattern!r}, a pattern too long to be meant", _REMEDY)
    try:
        for rule in RULES:
            regex.compile(rule.of(pattern))
    except (regex.error, RecursionError) as error:
        raise AdapterError(
            f"{where} is {pattern!r}, expected regular expressions", _REMEDY
        ) from error


def matches(patterns: Iterable[str], rule: PatternRule, module: str, source: str) -> list[str]:
    """The patterns that fit ``module``, in their order.

    Args:
        patterns: Checked ones.
        rule: By which they fit.
        module: Path of a module.
        source: The adapter, for messages.

    Raises:
        AdapterError: If it takes too long to tell.
    """
    import regex

    found = []
    for pattern in patterns:
        try:
            if regex.match(rule.of(pattern), module, timeout=_SECONDS):  # compiled ones are kept
                found.append(pattern)
        except TimeoutError as error:
            raise AdapterError(
                f"{source}: adapter_config.json: the pattern {pattern!r} takes too long to match",
                _REMEDY,
            ) from error
    return found
