"""Gemma 3: 270m and 1b, text alone; 4b, 12b and 27b with SigLIP."""

from typing import Any

from gemma_convert.convert.presets.preset import Preset, layer_types

_TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
}
_LARGE = {
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},  # of the global layers alone
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
}
_MORE: dict[str, dict[str, Any]] = {
    "gemma-3-4b": _LARGE,
    "gemma-3-12b": _LARGE,
    "gemma-3-27b": {**_LARGE, "query_pre_attn_scalar": 168},  # hidden size / heads
}

_WRAPPER: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_channels": 3,
        "image_size": 896,
        "patch_size": 14,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "vision_use_head": False,
    },
}

_SIZES = {
    "gemma-3-270m": {
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
    "gemma-3-1b": {
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
    "gemma-3-4b": {
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "gemma-3-12b": {
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
    },
    "gemma-3-27b": {
        "vocab_size": 262208,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
}

PRESETS = {
    name: Preset(
        sizes,
        {
            **_TEXT,
            **_MORE.get(name, {}),
            "layer_types": layer_types(6, sizes["num_hidden_layers"]),
        },
        "Gemma3ForCausalLM",
        _WRAPPER if name in _MORE else {},
    )
    for name, sizes in _SIZES.items()
}
