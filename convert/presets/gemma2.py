"""Gemma 2: 2b, 9b and 27b."""

from gemma_convert.convert.presets.preset import Preset, layer_types

_TEXT = {
    "model_type": "gemma2",
    "torch_dtype": "bfloat16",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

_SIZES = {
    "gemma-2-2b": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    # Tunix 0.1.7 says 28672 for the feed-forward size; the checkpoint has half of that.
    "gemma-2-9b": {
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
    },
    "gemma-2-27b": {
        "vocab_size": 256000,
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_hidden_layers": 46,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
}

# What a query is divided by the root of: the head dimension, but for the 27b, where it is hidden
# size / heads. MaxText e591f30 says 224 for the 9b; DeepMind's library has the head dimension.
_QUERY_SCALE = {"gemma-2-2b": 256, "gemma-2-9b": 256, "gemma-2-27b": 144}

PRESETS = {
    name: Preset(
        sizes,
        {
            **_TEXT,
            "query_pre_attn_scalar": _QUERY_SCALE[name],
            "layer_types": layer_types(2, sizes["num_hidden_layers"]),
        },
        "Gemma2ForCausalLM",
    )
    for name, sizes in _SIZES.items()
}
