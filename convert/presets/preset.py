"""A public model and the config.json that the Hub has for it. Data only.

The tables beside this file hold what decides numbers: sizes, RoPE, windows, caps, token ids, and
for models with towers the vision and audio parts. Values are those of transformers' own
conversion scripts and config classes (5.12.1), which the tests compare with Tunix, DeepMind's
library and MaxText. RoPE is written in the form of the Hub: Gemma 1 to 3 in the old one
(``rope_theta``), which every version of transformers and vLLM reads, Gemma 4 in the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOCAL, GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Preset:
    """One public model.

    Attributes:
        sizes: Keys of the text config that tell the model from others of its family.
        text: The other keys of its text config, model_type among them.
        text_class: Class in transformers of the text model alone.
        wrapper: Top level of config.json around ``text_config`` where there are towers; empty
            where the model is text alone.
    """

    sizes: Mapping[str, Any]
    text: Mapping[str, Any]
    text_class: str
    wrapper: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The text config, as it stands at the top level or nested."""
        return {**self.text, **self.sizes}


def hub_config(preset: Preset, *, multimodal: bool) -> dict[str, Any]:
    """config.json of ``preset``: class, model_type and nesting chosen together.

    Args:
        preset: A public model.
        multimodal: Whether the weights have towers; the text model's own class is written if not.

    Returns:
        config.json; its dtype is that of the Hub, bfloat16.
    """
    if multimodal and preset.wrapper:
        return {**preset.wrapper, "text_config": preset.config}
    return {"architectures": [preset.text_class], **preset.config}


def layer_types(period: int, layers: int) -> list[str]:
    """One global layer behind ``period - 1`` local ones, again and again."""
    return [GLOBAL if (i + 1) % period == 0 else LOCAL for i in range(layers)]
