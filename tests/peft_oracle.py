"""Adapters made by real PEFT on the tiny models, and PEFT's own logits of them, not merged.

Every factor is random: B is not zero, magnitudes are not the base's norms, saved modules differ
from what they replace. torch, transformers and PEFT are imported by the functions.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array
from tests import tiny

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_model(model: Any, seed: int = 5, **config: Any) -> Any:
    """``model`` with a LoRA adapter of ``config``, every value of the adapter random."""
    import torch
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():  # it remarks on tied heads, which is what some tests are about
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad:
                weight.copy_(torch.from_numpy(_values(random, name, weight)))
    return adapted


def _values(random: np.random.Generator, name: str, weight: Any) -> Array:
    shape, old = tuple(weight.shape), weight.detach().numpy()
    if "lora_magnitude_vector" in name or "modules_to_save" in name:
        return (old * random.normal(1.0, 0.2, shape)).astype(np.float32)
    deviation = 0.3 * shape[-1] ** -0.5 if "lora_A" in name or "embedding_B" in name else 0.3
    return random.normal(0.0, deviation, shape).astype(np.float32)


def save(adapted: Any, directory: Path) -> Path:
    """The adapter as PEFT saves it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(directory)
    return directory


def loaded_logits(model: Any, directory: Path) -> Array:
    """Logits of ``model`` with the adapter that PEFT itself loads from ``directory``.

    Every tensor of the file must have found its place, and none of the adapter's be missing.
    """
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(model, directory).eval()
    found = adapted.load_adapter(directory, adapter_name="again")
    assert not found.unexpected_keys
    assert not [key for key in found.missing_keys if "lora_" in key]
    return tiny.hf_logits(adapted)
