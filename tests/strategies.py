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
    """The config of a small Gemma 3 or 4 whose sizes are different primes.

    Heads are multi-query, grouped or full, never one; layers are local and global in any order.
    """
    kv, group, hidden, ffw, vocab, head, global_head = draw(st.permutations(PRIMES))
    attention = draw(st.sampled_from(("multi-query", "grouped", "full")))
    kv_heads = 1 if attention == "multi-query" else kv
    heads = kv if attention == "full" else kv_heads * group
    kinds = st.sampled_from(("sliding_attention", "full_attention"))
    layer_types = draw(st.lists(kinds, min_size=1, max_size=4))
    config: dict[str, Any] = {
        "model_type": "gemma3_text",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffw,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
    }
    if draw(st.booleans()):
        config |= {
            "model_type": "gemma4_text",
            "global_head_dim": global_head,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": draw(st.booleans()),
            "num_global_key_value_heads": draw(st.sampled_from((None, 1, 2, 3))),
        }
    return config
