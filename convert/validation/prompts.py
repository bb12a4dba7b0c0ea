"""What the models are asked: prompts, tokenised once, with exactly one BOS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.validation.prompt_texts import CHAT, TEXTS, long_text

WINDOW_MARGIN = 64
"""Tokens by which the prompt beyond the sliding window exceeds it."""

LONG = 2048
"""Tokens of the longest built-in prompt."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as both models get it.

    Attributes:
        name: For the report.
        ids: Token ids, the first of which is the BOS.
    """

    name: str
    ids: tuple[int, ...]


def check_bos(prompts: Sequence[Prompt], bos: int) -> None:
    """Refuse ids that do not begin with exactly one BOS.

    The same weights look broken when one side gets none or two.

    Raises:
        InputError: Naming the prompt.
    """
    for prompt in prompts:
        count = prompt.ids.count(bos)
        if not prompt.ids or prompt.ids[0] != bos or count != 1:
            begins = f"it begins with {list(prompt.ids[:2])}"
            raise InputError(
                f"prompt {prompt.name!r}: expected exactly one BOS ({bos}), and that first; "
                f"found {count}, {begins}",
                "Gemma gives nonsense without it and worse results with two",
            )


def check_ids(prompts: Sequence[Prompt], vocabularies: Mapping[str, int | None]) -> None:
    """Refuse ids beyond what an engine has an embedding for.

    Args:
        prompts: The prompts.
        vocabularies: Engine's name to the rows of its embedding.

    Raises:
        InputError: Naming the prompt.
    """
    for prompt in prompts:
        for name, rows in vocabularies.items():
            if rows is not None and max(prompt.ids) >= rows:
                raise InputError(
                    f"prompt {prompt.name!r}: token id {max(prompt.ids)}, and {name} has "
                    f"{rows} tokens",
                    "the tokenizer, or the ids of --prompts, are another model's",
                )


def built_in(tokenizer: Any, bos: int, window: int | None) -> list[Prompt]:
    """Short, code, many languages, chat, one beyond the sliding window, one past 2000 tokens.

    Args:
        tokenizer: Of transformers.
        bos: Its BOS.
        window: The model's sliding window; None if it has none.
    """
    prompts = [Prompt(name, encode(tokenizer, text, bos)) for name, text in TEXTS.items()]
    if getattr(tokenizer, "chat_template", None):
        prompts.append(Prompt("chat", chat(tokenizer, CHAT)))
    beyond = (window or 0) + WINDOW_MARGIN
    lengths = {"window": beyond} if window and beyond < LONG else {}
    for name, length in {**lengths, "long": max(LONG, beyond)}.items():
        prompts.append(Prompt(name, encode(tokenizer, long_text(length), bos)[:length]))
    return prompts


def encode(tokenizer: Any, text: str, bos: int) -> tuple[int, ...]:
    """Token ids of ``text`` behind one BOS, whether or not the tokenizer adds it."""
    return (bos, *(int(i) for i in tokenizer(text, add_special_tokens=False).input_ids))


def adds_bos(tokenizer: Any, bos: int) -> bool:
    """Whether text sent as text gets exactly one BOS."""
    ids = list(tokenizer("Water").input_ids)
    return bool(ids[:1] == [bos] and ids.count(bos) == 1)


def limited(
    prompts: Sequence[Prompt], limits: Mapping[str, int | None]
) -> tuple[list[Prompt], list[str]]:
    """The prompts that every engine takes, and notes of those left out.

    Args:
        prompts: All.
        limits: Engine's name to its longest prompt.
    """
    kept, notes = [], []
    for prompt in prompts:
        short = [n for n, limit in limits.items() if limit is not None and len(prompt.ids) > limit]
        if short:
            found = f"{len(prompt.ids)} tokens, {short[0]} takes {limits[short[0]]}"
            notes.append(f"prompt {prompt.name!r} was left out: {found}")
        else:
            kept.append(prompt)
    return kept, notes


def chat(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """Token ids of a conversation by the tokenizer's template."""
    # the template writes the BOS itself
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=False).input_ids)
