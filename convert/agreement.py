"""Whether two config.json describe the same text model: of two, one alone is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.model import Model, read_model, text_config
from gemma_convert.convert.registry import families
from gemma_convert.convert.rope import ROPE_KEYS

_NEUTRAL = re.compile(
    r"_.*|.*_token_id|.*_version|(torch_)?dtype|use_cache|architectures|model_type|initializer_.*|"
    r".*dropout|cache_implementation|vocab_size.*"
)
"""Keys of no matter to what the text model computes, and the rows, which have checks of their own.
RoPE and the tied head are compared as they are read, since they may be spelled in several ways."""


def require_same_text_model(source: Checkpoint, base: Checkpoint, model: Model) -> None:
    """Refuse weights beside a base whose config.json, which is written, makes another model.

    Args:
        source: The weights; nothing is compared if it has no config.json.
        base: A Hugging Face directory.
        model: As read from the base's config.json.

    Raises:
        ConfigError: Naming the first key that differs.
    """
    if not source.config or not base.config:
        return
    own = read_model(source.config, families())
    one, other = _told(source.config, own), _told(base.config, model)
    wrong = [key for key in one.keys() & other.keys() if one[key] != other[key]]
    if wrong:
        key = min(wrong)
        more = f", and {len(wrong) - 1} more keys differ" if len(wrong) > 1 else ""
        raise ConfigError(
            f"{source.source}: config.json: {key} is {one[key]!r}, in {base.source} it is "
            f"{other[key]!r}{more}; the output would have the base's",
            "leave --base out, or give a base whose config.json agrees",
        )


def _told(config: Mapping[str, Any], model: Model) -> dict[str, Any]:
    text = text_config(config)
    found = {
        key: value
        for key, value in {**model.family.defaults, **text}.items()
        if key not in ROPE_KEYS and not _NEUTRAL.fullmatch(key)
    }
    rope = {f"RoPE of {kind}": one for kind, one in model.rope.items()}
    return {**found, **rope, "tie_word_embeddings": model.tied}
