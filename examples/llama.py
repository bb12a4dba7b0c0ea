"""Llama 3 with a tied head, as a family of one's own: the whole port.

A package registers it with an entry point, and every command knows it:

    [project.entry-points."gemma_convert.families"]
    llama3 = "your_package.llama:FAMILY"
"""

from gemma_convert.convert.rows import Family, Row, row


def linear(name: str, hf: str, tunix: str, inputs: str) -> Row:
    """A projection of attention or of the MLP; ``name`` is the same in both layouts."""
    leaf = "w" if name.startswith("self_attn") else "kernel"
    short = name.replace("self_attn", "attn")
    return row(
        name,
        inputs=inputs,
        hf=(f"layers.{{i}}.{name}.weight", hf),
        tunix=(f"layers.{{i}}.{short}.{leaf}", tunix),
    )


def norm(name: str) -> Row:
    """A norm of a layer."""
    return row(name, hf=(f"layers.{{i}}.{name}.weight", "d"), tunix=(f"layers.{{i}}.{name}.w", "d"))


FAMILY = Family(
    name="llama3",
    rows=(
        row(
            "embedding",
            hf=("embed_tokens.weight", "v d"),
            tunix=("embedder.input_embedding", "v d"),
        ),
        row("final_norm", hf=("norm.weight", "d"), tunix=("final_norm.w", "d")),
        linear("self_attn.q_proj", "(n h) d", "d n h", "d"),
        linear("self_attn.k_proj", "(k h) d", "d k h", "d"),
        linear("self_attn.v_proj", "(k h) d", "d k h", "d"),
        linear("self_attn.o_proj", "d (n h)", "n h d", "n h"),
        linear("mlp.gate_proj", "f d", "d f", "d"),
        linear("mlp.up_proj", "f d", "d f", "d"),
        linear("mlp.down_proj", "d f", "f d", "f"),
        norm("input_layernorm"),
        norm("post_attention_layernorm"),
    ),
    model_types=("llama",),
    defaults={"sliding_window_pattern": 1, "tie_word_embeddings": False},
    unsupported={"attention_bias": "attention biases"},
    nested_prefix="model.language_model.",
    models={},
)
