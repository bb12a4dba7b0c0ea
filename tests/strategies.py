"""Random boxes and random models, for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gemma_convert.convert.tensor import Box

PRIMES = (2, 3, 5, 7, 11, 13, 17)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box inside ``shape`` with at least one element."""
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return tuple(
        (start, draw(st.integers(start + 1, size)))
        for start, size in zip(starts, shape, strict=True)
    )


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """The config of a small model of any family whose sizes are different primes.

    Heads are multi-query, grouped or full, never one; layers are local and global in any order.
    """
    kv, group, hidden, ffw, vocab, head, global_head = draw(st.permutations(PRIMES))
    attention = draw(st.sampled_from(("multi-query", "grouped", "full")))
    kv_heads = 1 if attention == "multi-query" else kv
    heads = kv if attention == "full" else kv_heads * group
    kinds = st.sampled_from(("sliding_attention", "full_attention"))
    layer_types = draw(st.lists(kinds, min_size=1, max_size=4))
    config: dict[str, Any] = {
        "model_type": draw(st.sampled_from(("gemma", "gemma2", "gemma3_text", "gemma4_text"))),
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffw,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
    }
    if config["model_type"] == "gemma4_text":
        config |= {"global_head_dim": global_head, "hidden_size_per_layer_input": 0}
        config |= draw(_gemma4_parts(len(layer_types)))
    return config


@st.composite
def _gemma4_parts(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """What only some models of Gemma 4 have, in any combination."""
    experts, expert_ffw, per_layer = draw(st.permutations((2, 3, 5)))
    parts: dict[str, Any] = {
        "attention_k_eq_v": draw(st.booleans()),
        "num_global_key_value_heads": draw(st.sampled_from((None, 1, 2, 3))),
        "num_kv_shared_layers": draw(st.integers(0, layers - 1)),
        "use_double_wide_mlp": draw(st.booleans()),
    }
    if draw(st.booleans()):
        parts |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "moe_intermediate_size": expert_ffw,
        }
    if draw(st.booleans()):
        parts |= {"hidden_size_per_layer_input": per_layer, "vocab_size_per_layer_input": 19}
    return parts


@st.composite
def tower_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Configs of a small model with towers whose sizes differ, in one of the public forms."""
    text, ffw, heads, head, positions, tap, out = draw(st.permutations(PRIMES))
    layers = draw(st.integers(1, 3))
    common = {"intermediate_size": ffw, "num_hidden_layers": layers, "num_attention_heads": heads}
    family = draw(st.sampled_from(("gemma3", "gemma4")))
    config: dict[str, Any] = {
        "model_type": family,
        "text_config": {"model_type": f"{family}_text", "hidden_size": text},
    }
    if family == "gemma3":
        patch, side = draw(st.permutations((2, 3)))
        sizes = {"hidden_size": heads * head, "patch_size": patch, "image_size": patch * side}
        return config | {"vision_config": common | sizes}
    vision = {
        "hidden_size": 19,
        "num_key_value_heads": heads,
        "head_dim": head,
        "patch_size": 2,
        "position_embedding_size": positions,
        "standardize": draw(st.booleans()),
        "use_clipped_linears": draw(st.booleans()),
    }
    audio = {
        "hidden_size": heads * head,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "subsampling_conv_channels": [4 * text, positions],
        "conv_kernel_size": tap,
        "output_proj_dims": out,
        "use_clipped_linears": draw(st.booleans()),
    }
    parts = draw(st.sampled_from((("vision",), ("vision", "audio"))))
    found = {"vision": common | vision, "audio": audio}
    return config | {f"{part}_config": found[part] for part in parts}
