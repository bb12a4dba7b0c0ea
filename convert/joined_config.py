"""One config.json for weights that have one, beside a base that has another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gemma_convert.convert.model import text_config

_TIED = "tie_word_embeddings"
_OF_A_FILE = ("architectures", "transformers_version", "_name_or_path")
"""Keys of a whole config.json, of no meaning within ``text_config``."""


def joined_config(
    own: Mapping[str, Any], base: Mapping[str, Any], lacking: Collection[str]
) -> Mapping[str, Any]:
    """The config.json of weights of their own, in whose model the base's towers may stand.

    The text model is what the weights were trained as, so it is ``own``'s; a base of a text model
    alone has nothing to add. What stands around the text model is ``own``'s too, if it has it, but
    for towers that come from the base.

    Args:
        own: Of the weights, as parsed.
        base: Of the base, as parsed.
        lacking: Parts (``vision``, ``audio``) of which the weights have no tower.
    """
    if text_config(base) is base:
        return own
    text = text_config(own)
    around = {} if text is own else own
    foreign = {f"{part}_config" for part in lacking} & base.keys()
    joined = {**base, **{key: value for key, value in around.items() if key not in foreign}}
    joined["text_config"] = {key: text[key] for key in text if key not in _OF_A_FILE}
    joined.pop(_TIED, None)
    tied = {key: of[key] for of in (text, own) for key in (_TIED,) if key in of}
    return {**joined, **tied}
