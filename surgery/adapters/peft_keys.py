"""The names of tensors in PEFT adapters, with what trainers and wrappers put around them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gemma_convert.convert.layouts import HF, Spelling
from gemma_convert.convert.registry import names_text_parameter

FACTORS = {
    "lora_A": "a",
    "lora_B": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
}
"""PEFT's names of a pair's tensors, and ours."""

_WRAPPERS = frozenset(
    {
        "_orig_mod",  # torch.compile
        "_orig_module",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_forward_module",  # DeepSpeed
    }
)
_LEADING = (
    ("base_model", "model"),  # PEFT
    ("base_model",),
    ("pretrained_model",),  # TRL's models with a value head
    ("module",),  # torch's data parallel
)
_FACTOR = re.compile(
    rf"(?P<module>.+)\.(?P<factor>{'|'.join(FACTORS)})(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?"
    r"(?:\.(?P<leaf>weight|bias))?"
)
_SAVED = re.compile(r"(?P<module>.+)\.(?P<place>modules_to_save|original_module)\.(?P<rest>.+)")
_BASE = "base_layer"


@dataclass(frozen=True)
class Key:
    """What the name of one tensor in an adapter says.

    Attributes:
        module: Path of the module, or of the weight for a tensor that is no factor, as PEFT matches
            it against patterns.
        factor: ``a``, ``b`` or ``magnitude``; ``bias`` of B; ``saved`` for what replaces a weight
            of the base; ``original`` for what a saved module replaced.
        adapter: The adapter's name, where the key has one.
        depth: How many wrappers of parameters lie around it (PEFT's nested ``lora.ParamWrapper``).
        copied: Whether it stands in a copy of a module (``modules_to_save``).
    """

    module: str
    factor: str
    adapter: str | None = None
    depth: int = 0
    copied: bool = False


def read_key(text: str) -> Key:
    """Take the name of a tensor in an adapter apart."""
    clean = unwrapped(text)
    found = _FACTOR.fullmatch(clean)
    if found is not None:
        words = found["module"].split(".")
        module = ".".join(word for word in words if word != _BASE)
        factor = "bias" if found["leaf"] == "bias" else FACTORS[found["factor"]]
        return Key(module, factor, found["adapter"], words.count(_BASE))
    saved = _SAVED.fullmatch(clean)
    if saved is None:
        return Key(clean.replace(f".{_BASE}.", "."), "saved")
    if saved["place"] == "original_module":
        return Key(f"{saved['module']}.{saved['rest']}", "original")
    adapter, _, leaf = saved["rest"].partition(".")
    return Key(f"{saved['module']}.{leaf}", "saved", adapter, copied=True)


def weight_name(path: str) -> str:
    """The name under which an `Adapter` has the weight at ``path``.

    A weight of the text model is named as its row does, without any wrapper's prefix; so the same
    module has the same name, however the model was wrapped when it was trained. Others lose a
    leading ``model.``, and the word that transformers 5 no longer has in vision towers.
    """
    for prefix in HF.prefixes:
        short = path.removeprefix(prefix)
        if path.startswith(prefix) and names_text_parameter(short, Spelling(HF, "")):
            return short
    if path.endswith("lm_head.weight"):
        return "lm_head.weight"
    return path.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")


def unwrapped(text: str) -> str:
    """The key without what trainers and wrappers put around the model's own names."""
    words = [word for word in text.split(".") if word not in _WRAPPERS]
    leading = True
    while leading:
        leading = False
        for wrapper in _LEADING:
            if tuple(words[: len(wrapper)]) == wrapper and len(words) > len(wrapper):
                words, leading = words[len(wrapper) :], True
                break
    return ".".join(words)
