"""From what a user names to a comparison of logits: engines, tokenizer, prompts, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_convert.convert.errors import InputError
from gemma_convert.convert.model import text_config
from gemma_convert.convert.readers import open_headers
from gemma_convert.convert.readers.jsonfile import read_object
from gemma_convert.convert.readers.remote import remote_path
from gemma_convert.convert.readers.safetensors import CONFIG_NAME
from gemma_convert.convert.validation.engines.base import Source
from gemma_convert.convert.validation.engines.choose import Options, choose, is_address
from gemma_convert.convert.validation.logits import MOST_POSITIONS, Tell, validate_logits
from gemma_convert.convert.validation.prompt_file import from_file
from gemma_convert.convert.validation.prompts import (
    Prompt,
    adds_bos,
    built_in,
    check_bos,
)
from gemma_convert.convert.validation.result import Finding, Result
from gemma_convert.convert.validation.verdict import NO_OVERRIDES, Overrides, limits_for

DEFAULT_BOS = 2
"""Gemma's BOS, where no config or tokenizer says another."""


@dataclass(frozen=True)
class Request:
    """What to compare.

    Attributes:
        a: Path or address of the one that counts as right.
        b: Of the one to judge.
        options_a: How to open ``a``.
        options_b: How to open ``b``.
        prompts: A file of prompts; the built-in ones if None.
        layers: Whether to look for the first diverging layer.
        positions: Positions of a prompt that are compared at most.
        limits: Limits to replace.
    """

    a: str
    b: str
    options_a: Options
    options_b: Options
    prompts: Path | None = None
    layers: bool = False
    positions: int = MOST_POSITIONS
    limits: Overrides = NO_OVERRIDES


def compare_logits(
    request: Request, tell: Tell = lambda text: None, *, a: Source | None = None
) -> Result:
    """Open both sides, tokenise once, run and judge.

    Args:
        request: What to compare.
        tell: Called with a line for each prompt that an engine runs.
        a: Runs in the place of what ``request`` names.

    Raises:
        GemmaConvertError: If a side cannot run, or the prompts do not fit.
    """
    a = a or choose(request.a, request.options_a)
    b = choose(request.b, request.options_b)
    for source in (a, b):  # an engine may run for long before the other is loaded
        source.require_runnable()
    tokenizers = {
        source.about.name: _tokenizer(source.about.tokenizer)
        for source in (a, b)
        if source.about.tokenizer is not None
    }
    config = _config(request)
    first = next(iter(tokenizers.values()), None)
    bos = _bos(config, first)
    prompts = _prompts(request, first, bos, config)
    findings = [
        Finding(name, f"its tokenizer does not put exactly one BOS ({bos}) before text")
        for name, tokenizer in tokenizers.items()
        if not adds_bos(tokenizer, bos)
    ]
    return validate_logits(
        a,
        b,
        prompts,
        limits_for(a.about, b.about, request.limits),
        bos=bos,
        layers=request.layers,
        positions=request.positions,
        findings=[*findings, *_other_ids(tokenizers)],
        tell=tell,
    )


def require_tokenizer(directory: Path | None, config: Mapping[str, Any]) -> None:
    """Refuse what has no tokenizer to write the built-in prompts with, or one that breaks them.

    Args:
        directory: Where it should lie.
        config: config.json.

    Raises:
        InputError: If there is none, or it does not put exactly one BOS before text.
    """
    if directory is None:
        raise InputError(
            "neither checkpoint nor base has a tokenizer", "give a base directory with one"
        )
    tokenizer = _tokenizer(directory)
    bos = _bos(config, tokenizer)
    if not adds_bos(tokenizer, bos):
        raise InputError(
            f"{directory}: its tokenizer does not put exactly one BOS ({bos}) before text",
            "mend the base's tokenizer",
        )
    window = text_config(config).get("sliding_window")
    check_bos(built_in(tokenizer, bos, window), bos)


def _prompts(
    request: Request, tokenizer: Any | None, bos: int, config: Mapping[str, Any]
) -> list[Prompt]:
    if request.prompts is not None:
        return from_file(request.prompts, tokenizer, bos)
    if tokenizer is None:
        raise InputError(
            f"neither {request.a} nor {request.b} has a tokenizer",
            "give a directory with one as --base, or ids with --prompts",
        )
    return built_in(tokenizer, bos, text_config(config).get("sliding_window"))


def _other_ids(tokenizers: Mapping[str, Any]) -> list[Finding]:
    """Whether two tokenizers give other ids for one text."""
    if len(tokenizers) < 2:
        return []
    text = "Water boils at 100 °C; ¿cuándo? 水 \n\tdef f(x):  return x"
    (one, first), (other, second) = tokenizers.items()
    x, y = (list(t(text, add_special_tokens=False).input_ids) for t in (first, second))
    return [] if x == y else [Finding(other, f"its tokenizer gives other ids than that of {one}")]


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def _config(request: Request) -> Mapping[str, Any]:
    """config.json of one of the sides or their bases."""
    named = [Path(name) for name in (request.a, request.b) if not is_address(name)]
    places = [*named, request.options_a.base, request.options_b.base]
    for place in places:
        if place is not None and remote_path(place) is not None:
            config = open_headers(place).config
        elif place is not None and (place / CONFIG_NAME).is_file():
            config = read_object(place / CONFIG_NAME)
        else:
            continue
        if config:
            return config
    return {}


def _bos(config: Mapping[str, Any], tokenizer: Any | None) -> int:
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id)
    told = text_config(config).get("bos_token_id", config.get("bos_token_id"))
    return told if isinstance(told, int) else DEFAULT_BOS
