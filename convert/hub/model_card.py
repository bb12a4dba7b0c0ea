"""The generated README.md of a pushed model: what it is made of, how to load it, what was checked.

What a user wrote into a README.md stays. The generated part stands between two marks and is the
only text that a later push replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemma_convert.convert.hub.front_matter import with_front_matter

CARD_NAME = "README.md"
BEGIN = (
    "<!-- gemma-convert: what stands from here to the next mark is replaced by the next push -->"
)
END = "<!-- gemma-convert: end -->"

LICENSE_KEYS = ("license", "license_name", "license_link")
"""What a card says of the licence, carried from the base's."""

_LICENSE_LENGTH = 1000
"""Longest name or address of a licence, in characters."""


def stated_license(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `LICENSE_KEYS` of a card's metadata, those that are a short text or a list of some."""
    found = {key: metadata[key] for key in LICENSE_KEYS if metadata.get(key)}
    return {key: value for key, value in found.items() if _is_short(value)}


def _is_short(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) for text in texts) and sum(map(len, texts)) <= _LICENSE_LENGTH


@dataclass(frozen=True)
class Card:
    """What a model card is made from.

    Attributes:
        repo: ``org/name`` of the repository.
        config: config.json; empty for an adapter.
        adapter_config: adapter_config.json of a PEFT adapter; empty for a model.
        ledger: conversion.json, without local paths; empty if there is none.
        validation: Results of checks, as ``gemma-convert validate --json`` prints them: ``title``,
            ``passed`` and ``summary``.
        base_model: The base's Hub id, if known.
        license: The base's `LICENSE_KEYS`.
        layout: Layout of an Orbax checkpoint; empty for safetensors.
    """

    repo: str
    config: Mapping[str, Any] = field(default_factory=dict)
    adapter_config: Mapping[str, Any] = field(default_factory=dict)
    ledger: Mapping[str, Any] = field(default_factory=dict)
    validation: Sequence[Mapping[str, Any]] = ()
    base_model: str | None = None
    license: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""


def card_metadata(card: Card) -> dict[str, Any]:
    """The card's metadata, by the names that the Hub knows."""
    metadata: dict[str, Any] = dict(card.license)
    if card.base_model:
        metadata["base_model"] = card.base_model
        if card.adapter_config:
            metadata["base_model_relation"] = "adapter"
        elif card.ledger.get("adapters"):
            metadata["base_model_relation"] = "finetune"
    if card.adapter_config:
        metadata["library_name"] = "peft"
    elif not card.layout:
        metadata["library_name"] = "transformers"
    images = isinstance(card.config.get("vision_config"), Mapping)
    metadata["pipeline_tag"] = "image-text-to-text" if images else "text-generation"
    family = card.ledger.get("model", {}).get("family")
    adapter = ["lora"] if card.adapter_config or card.ledger.get("adapters") else []
    metadata["tags"] = ["gemma-convert", *([family] if family else []), *adapter]
    return metadata


def render_card(card: Card, existing: str | None) -> str:
    """The README to push.

    Args:
        card: What there is to say.
        existing: The user's README, if there is one. All of it stays but the part between the
            marks; where it has no marks, only metadata that it lacks is added.
    """
    metadata = card_metadata(card)
    if existing is None:
        text = f"# {card.repo.split('/')[-1]}\n\n{card_body(card)}"
        return with_front_matter(text, metadata, CARD_NAME)
    begin, end = existing.find(BEGIN), existing.find(END)
    if 0 <= begin < end:
        rest = existing[end + len(END) :].removeprefix("\n")
        existing = existing[:begin] + card_body(card) + rest
    return with_front_matter(existing, metadata, CARD_NAME)


def card_body(card: Card) -> str:
    """The generated part, between the marks."""
    sections = [_what(card), _use(card), _adapter(card), _conversion(card), _validation(card)]
    return "\n\n".join([BEGIN, *filter(None, sections), END]) + "\n"


def _what(card: Card) -> str:
    base = f"[{card.base_model}](https://huggingface.co/{card.base_model})"
    model = card.ledger.get("model", {})
    name = base if card.base_model else (model.get("name") or model.get("family") or "")
    of = f" of {name}" if name else ""
    if card.adapter_config:
        return f"A LoRA adapter{of}, in PEFT's format, uploaded by gemma-convert."
    if card.ledger.get("adapters"):
        return f"A fine-tune{of}: LoRA factors merged into the weights, by gemma-convert."
    return f"A checkpoint{of}, converted by gemma-convert."


def _use(card: Card) -> str:
    if card.layout:
        return f"## Use\n\nAn Orbax checkpoint in the layout of {card.layout}, for JAX."
    python, shell = _use_adapter(card) if card.adapter_config else _use_model(card)
    return f"## Use\n\n```python\n{python}\n```\n\n```bash\n{shell}\n```"


def _use_model(card: Card) -> tuple[str, str]:
    images = isinstance(card.config.get("vision_config"), Mapping)
    model = "AutoModelForImageTextToText" if images else "AutoModelForCausalLM"
    first = "AutoProcessor" if images else "AutoTokenizer"
    python = (
        f"from transformers import {', '.join(sorted((model, first)))}\n\n"
        f'{first.removeprefix("Auto").lower()} = {first}.from_pretrained("{card.repo}")\n'
        f'model = {model}.from_pretrained("{card.repo}", dtype="auto")'
    )
    return python, f"vllm serve {card.repo}"


def _use_adapter(card: Card) -> tuple[str, str]:
    base = card.base_model or "BASE"
    python = (
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{base}")\n'
        f'model = PeftModel.from_pretrained(model, "{card.repo}")'
    )
    rank = _lora_rank(card.adapter_config)
    return python, f"vllm serve {base} --enable-lora --lora-modules name={card.repo}{rank}"


def _lora_rank(config: Mapping[str, Any]) -> str:
    """The option without which vLLM refuses adapters of a rank above 16."""
    pattern = config.get("rank_pattern")
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, Mapping) else ())]
    largest = max((rank for rank in ranks if isinstance(rank, int)), default=0)
    return f" --max-lora-rank {largest}" if largest > 16 else ""


def _adapter(card: Card) -> str:
    merged, peft = card.ledger.get("adapters"), card.adapter_config
    if merged:
        rows = [row for adapter in merged for row in _merged_rows(adapter)]
        rows.append(("modules", _listed(modules(card.ledger.get("survival_by_tensor", {})))))
        survival = card.ledger.get("survival", {})
        if (error := survival.get("relative_error")) is not None:
            rows.append(("delta kept", f"to a relative error of {error:.2%}, by the rounding"))
    elif peft:
        targets = peft.get("target_modules")
        names = sorted(map(str, targets)) if isinstance(targets, list) else [targets or ""]
        rows = [
            ("rank", _number(peft.get("r"))),
            ("alpha", _number(peft.get("lora_alpha"))),
            ("modules", _listed(names)),
        ]
    else:
        return ""
    return _table("## Adapter", rows)


def _merged_rows(adapter: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One adapter that was merged; alpha is the rank times the scale where all modules agree."""
    ranks, scales = adapter.get("ranks", []), adapter.get("scales", [])
    alone = len(ranks) == len(scales) == 1
    rows = [
        ("rank", _listed(ranks)),
        ("alpha", _number(ranks[0] * scales[0])) if alone else ("scale", _listed(scales)),
    ]
    if adapter.get("weight", 1) != 1:
        rows.append(("weight", _number(adapter["weight"])))
    pairs = f"{adapter.get('pairs_found')} found, {adapter.get('pairs_changed')} changed"
    return [*rows, ("pairs", pairs)]


def modules(tensors: Mapping[str, Any]) -> list[str]:
    """The modules that tensors belong to: ``q_proj`` of ``layers.0.self_attn.q_proj.weight``."""
    names = {name.removesuffix(".weight").split(".")[-1] for name in tensors}
    return sorted(names)


def _conversion(card: Card) -> str:
    ledger = card.ledger
    if not ledger:
        return ""
    counts = ", ".join(f"{n} {action}" for action, n in ledger.get("counts", {}).items() if n)
    inputs = [f"{i.get('path')} ({i.get('format')})" for i in ledger.get("inputs", ())]
    rows = [
        ("command", f"`{ledger.get('command', '')}`"),
        ("inputs", ", ".join(inputs)),
        ("tensors", counts),
        ("tool", f"{ledger.get('tool')}, {ledger.get('created')}"),
    ]
    text = _table("## Conversion", rows)
    return f"{text}\n\nEvery tensor is accounted for in [conversion.json](conversion.json)."


def _validation(card: Card) -> str:
    sections = [_verdict(result) for result in card.validation]
    return "\n\n".join(["## Validation", *sections]) if sections else ""


def _verdict(result: Mapping[str, Any]) -> str:
    """One check: its title, whether it passed, and its summary."""
    verdict = {True: "passed", False: "FAILED"}.get(result.get("passed", ""), "not told")
    rows = [(_cell(key), str(value)) for key, value in result.get("summary", {}).items()]
    title = _cell(result.get("title") or result.get("check") or "check")
    return _table(f"### {title}", [("verdict", verdict), *rows])


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {key} | {_cell(text)} |" for key, text in rows]
    return "\n".join([title, "", "| | |", "|---|---|", *lines])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
