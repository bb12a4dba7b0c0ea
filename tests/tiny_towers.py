"""Tiny models with towers, built and saved by transformers. Sizes are distinct.

Heads 5 of 7 (SigLIP, 5 x 7 = 35) or of 4 (Gemma 4: 5 x 4 = 20 from 35), patches of 2 x 2 pixels,
a grid of 3 x 3; in the audio tower 3 heads of 7, channels 20 and 11, five frequencies, nine taps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_cases import CASES

SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 35,
    "intermediate_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "image_size": 6,
    "patch_size": 2,
    "vision_use_head": False,
}
VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 35,
    "intermediate_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 4,
    "patch_size": 2,
    "position_embedding_size": 13,
}
AUDIO: dict[str, Any] = {
    "model_type": "gemma4_audio",
    "hidden_size": 21,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "subsampling_conv_channels": [20, 11],
    "conv_kernel_size": 9,
    "output_proj_dims": 16,
}
PARTS: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": SIGLIP, "mm_tokens_per_image": 1},
    "gemma4": {"vision_config": VISION | {"standardize": True}},
    "gemma4-e2b": {
        "vision_config": VISION | {"use_clipped_linears": True},
        "audio_config": AUDIO,
    },
}
"""Case of tests/tiny_cases.py to what its config.json says beside the text model."""

TWINS = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of Gemma 4's vision tower that are one einsum in JAX: their bounds are equal."""


def config(case: str) -> Any:
    """The whole config of transformers."""
    import transformers

    text = CASES[case].hf_class.removesuffix("TextConfig")
    model_type = "gemma3_text" if case == "gemma3" else "gemma4_text"
    return getattr(transformers, f"{text}Config")(
        text_config=CASES[case].hf_config | {"model_type": model_type},
        tie_word_embeddings=True,
        **PARTS[case],
    )


def save(case: str, directory: Path, seed: int = 0) -> Path:
    """Save a model of ``case`` in bfloat16, every parameter and every clip bound random."""
    import torch
    import transformers

    model = getattr(transformers, _class(case))(config(case))
    random = np.random.default_rng(seed)
    state = model.state_dict()
    for weight in state.values():  # matrices keep the size of what they multiply
        inputs = int(np.prod(weight.shape[1:])) if weight.ndim > 1 else 0
        mean, deviation = (0.0, inputs**-0.5) if inputs else (0.3, 0.2)
        values = random.normal(mean, deviation, tuple(weight.shape)).astype(np.float32)
        weight.copy_(torch.from_numpy(np.asarray(values)))
    for name, weight in state.items():
        for one, other in TWINS:
            if f".{one}." in name and name.endswith(("_min", "_max")) and "vision" in name:
                state[name.replace(one, other)].copy_(weight)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def _class(case: str) -> str:
    return f"{CASES[case].hf_class.removesuffix('TextConfig')}ForConditionalGeneration"
