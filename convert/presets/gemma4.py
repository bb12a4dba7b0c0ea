"""Gemma 4: 31B, 26B-A4B, 12B, E4B and E2B."""

from typing import Any

from gemma_convert.convert.presets.preset import GLOBAL, LOCAL, Preset, layer_types

_LARGE = {"vocab_size": 262144, "head_dim": 256, "global_head_dim": 512}
_DENSE = {**_LARGE, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
_SMALL = {
    **_LARGE,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_attention_heads": 8,
}

_SIZES: dict[str, dict[str, Any]] = {
    "gemma-4-31b": {
        **_DENSE,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "gemma-4-26b-a4b": {
        **_DENSE,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "gemma-4-12b": {
        **_DENSE,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
    },
    "gemma-4-e4b": {
        **_SMALL,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
    },
    "gemma-4-e2b": {
        **_SMALL,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "layer_types": ([LOCAL] * 4 + [GLOBAL]) * 7,
    },
}

_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        GLOBAL: {
            "rope_type": "proportional",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
        },
        LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    },
    "final_logit_softcapping": 30.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LARGE_TEXT = {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",  # among the tokens of one image
}
_SMALL_TEXT = {
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
}

_WRAPPER: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "video_token_id": 258884,
    "boa_token_id": 256000,
    "eoa_token_id": 258883,
    "eoa_token_index": 258883,
    "audio_token_id": 258881,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
    "vision_soft_tokens_per_image": 280,
    "vision_config": None,
    "audio_config": None,
}
_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "dtype": "bfloat16",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "max_position_embeddings": 131072,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
    "default_output_length": 280,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_LARGE_WRAPPER = {
    **_WRAPPER,
    "vision_config": {
        **_VISION,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "standardize": True,
        "use_clipped_linears": False,
    },
}
_SMALL_WRAPPER = {
    **_WRAPPER,
    "vision_config": {
        **_VISION,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "standardize": False,
        "use_clipped_linears": True,
    },
    "audio_config": {
        "model_type": "gemma4_audio",
        "dtype": "bfloat16",
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "hidden_act": "silu",
        "subsampling_conv_channels": [128, 32],
        "conv_kernel_size": 5,
        "residual_weight": 0.5,
        "attention_chunk_size": 12,
        "attention_context_left": 13,
        "attention_context_right": 0,
        "attention_logit_cap": 50.0,
        "attention_invalid_logits_value": -1.0e9,
        "use_clipped_linears": True,
        "rms_norm_eps": 1e-6,
        "gradient_clipping": 1e10,
        "output_proj_dims": 1536,
    },
}
# The 12B has no towers but projections of patches and of audio frames, in classes of its own.
_UNIFIED_TYPE = {"model_type": "gemma4_unified_text"}
_UNIFIED_WRAPPER = {
    **_WRAPPER,
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "model_type": "gemma4_unified",
    "vision_config": {
        "model_type": "gemma4_unified_vision",
        "dtype": "bfloat16",
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
        "output_proj_dims": 3840,
        "rms_norm_eps": 1e-6,
    },
    "audio_config": {
        "model_type": "gemma4_unified_audio",
        "dtype": "bfloat16",
        "audio_embed_dim": 640,
        "rms_norm_eps": 1e-6,
    },
}

_KINDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "gemma-4-31b": (_LARGE_TEXT, "Gemma4ForCausalLM", _LARGE_WRAPPER),
    "gemma-4-26b-a4b": (_LARGE_TEXT, "Gemma4ForCausalLM", _LARGE_WRAPPER),
    "gemma-4-12b": (_LARGE_TEXT | _UNIFIED_TYPE, "Gemma4UnifiedForCausalLM", _UNIFIED_WRAPPER),
    "gemma-4-e4b": (_SMALL_TEXT, "Gemma4ForCausalLM", _SMALL_WRAPPER),
    "gemma-4-e2b": (_SMALL_TEXT, "Gemma4ForCausalLM", _SMALL_WRAPPER),
}

PRESETS = {
    name: Preset(
        sizes,
        {**_TEXT, **_KINDS[name][0], "layer_types": layer_types(6, sizes["num_hidden_layers"])},
        *_KINDS[name][1:],
    )
    for name, sizes in _SIZES.items()
}
