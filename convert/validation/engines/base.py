"""What an engine is: something that gives next-token scores for token ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gemma_convert.convert.tensor import Array


@dataclass(frozen=True)
class Logits:
    """Scores of the whole vocabulary.

    Attributes:
        values: float32, (positions, vocabulary).
        hidden: float32, (layers + 1, positions, hidden): what enters the first layer, then what
            leaves each; None if not asked for or not to be had.
    """

    values: Array
    hidden: Array | None = None


@dataclass(frozen=True)
class TopK:
    """The likeliest tokens alone, as a server tells them.

    Attributes:
        ids: (positions, k) token ids, the likeliest first; -1 where there are fewer.
        logprobs: (positions, k) natural logarithms of their probabilities; -inf where id is -1.
        next_logprobs: (positions,) of the token that follows in the prompt; NaN behind the last.
    """

    ids: Array
    logprobs: Array
    next_logprobs: Array


@dataclass(frozen=True)
class About:
    """What a report says of an engine.

    Attributes:
        name: Path or address.
        kind: ``transformers``, ``tunix``, ``peft`` or ``server``.
        dtype: In which it computes, such as ``float32``.
        stored: In which its weights are stored, such as ``bfloat16``.
        adapted: Whether LoRA factors are applied while it runs, not merged.
        limit: The longest prompt it takes, in tokens; None if there is no limit.
        tokenizer: A directory with its tokenizer, if it has one.
        vocabulary: Rows of its embedding; None if unknown.
    """

    name: str
    kind: str
    dtype: str
    stored: str
    adapted: bool = False
    limit: int | None = None
    tokenizer: Path | None = None
    vocabulary: int | None = None


class Engine(Protocol):
    """Runs prompts, one at a time, from the first token and without a cache."""

    @property
    def about(self) -> About:
        """What a report says of it."""

    def run(self, ids: list[int], keep: list[int], *, layers: bool) -> Logits | TopK:
        """Scores of the token after each position in ``keep``.

        Args:
            ids: Token ids of the prompt, its BOS included.
            keep: Positions to give scores for, in order.
            layers: Whether hidden states are wanted too.
        """


class Source(Protocol):
    """An engine that is not loaded yet."""

    @property
    def about(self) -> About:
        """What a report says of it."""

    def require_runnable(self) -> None:
        """Refuse, before any weight is read, what cannot be loaded.

        Raises:
            GemmaConvertError: If packages are missing, or no model fits its config.json.
        """

    def load(self) -> Engine:
        """Load it; its memory is freed with the engine."""
