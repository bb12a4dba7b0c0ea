"""Gemma 1: 2b and 7b."""

from gemma_convert.convert.presets.preset import Preset

_TEXT = {
    "model_type": "gemma",
    "torch_dtype": "bfloat16",
    # The Hub says gelu under the first key, which transformers 5 reads and older versions do not.
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

_SIZES = {
    "gemma-2b": {
        "vocab_size": 256000,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
    },
    "gemma-7b": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
}

PRESETS = {name: Preset(sizes, _TEXT, "GemmaForCausalLM") for name, sizes in _SIZES.items()}
