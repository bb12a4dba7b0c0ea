"""The vision tower of Gemma 4 and the projection behind it; E2B and E4B clip what goes in and out.

Sources: transformers 5.12.1 (``Gemma4VisionModel``), Tunix git c7d8950, DeepMind's library (git
7691fd4), MaxText's ``GEMMA4_MAXTEXT_TO_HF_PARAM_MAPPING`` (git e591f30). Tunix 0.1.7 has no tower
for Gemma 4, MaxText none that clips.

Clip bounds: the JAX einsums that make keys and values, or gate and up, from one input have one set
of bounds; Hugging Face's linear layers have one each.
"""

from collections.abc import Mapping
from typing import Any

from gemma_convert.convert.rows import Layer, Row, Tower, row
from gemma_convert.convert.sizes import positive
from gemma_convert.convert.stacking import Place, Stacking

_HF_LAYER = "vision_tower.encoder.layers.{i}"
_TUNIX_LAYER = "vision_encoder.layers.{i}"
_DEEPMIND_LAYER = "vision_encoder/transformer/layer_{i}"
_MAXTEXT = "vision_encoder/Gemma4VisionEncoderLayer_0"
_MAXTEXT_LAYER = f"{_MAXTEXT}/layer_{{i}}"


def sizes(config: Mapping[str, Any], text_size: int) -> dict[str, int]:
    """Sizes of the axes; a patch is a square of pixels of three colours."""
    return {
        "t": text_size,
        "d": positive(config, "hidden_size"),
        "n": positive(config, "num_attention_heads"),
        "k": positive(config, "num_key_value_heads"),
        "h": positive(config, "head_dim"),
        "f": positive(config, "intermediate_size"),
        "a": 3 * positive(config, "patch_size") ** 2,
        "g": 2,
        "u": positive(config, "position_embedding_size"),
    }


def clips(layer: Layer) -> bool:
    """A tower with clip bounds."""
    return "use_clipped_linears" in layer.flags


def standardizes(layer: Layer) -> bool:
    """A tower that shifts and scales what it gives."""
    return "standardize" in layer.flags


def bounds(name: str, hf: str, tunix: str, deepmind: str, *, repeated: str = "") -> Row:
    """The four clip bounds of a linear layer, by the names of its modules."""
    words = "input_min,input_max,output_min,output_max"
    clip_words = ",".join(f"clip_{word}" for word in words.split(","))
    return row(
        f"{name}_bounds",
        where=clips,
        repeated=repeated,
        hf=(f"{hf}.{{b:{words}}}", ""),
        tunix_head=(f"{tunix}.{{b:{clip_words}}}", ""),
        deepmind=(f"{deepmind}/{{b:{clip_words}}}", ""),
    )


def _norm(hf: str, jax: str, module: str = "", *, axis: str = "d") -> Row:
    """A norm by its names, those in JAX inside ``module``."""
    inside = f"{module}." if module else ""
    flax = inside.replace(".", "/")
    return row(
        jax,
        hf=(f"{_HF_LAYER}.{hf}.weight", axis),
        tunix_head=(f"{_TUNIX_LAYER}.{inside}{jax}.scale", axis),
        deepmind=(f"{_DEEPMIND_LAYER}/{flax}{jax}/scale", axis),
        maxtext=(f"{_MAXTEXT_LAYER}/{flax.replace('attn', 'attention')}{jax}/scale", axis),
    )


ENTRY = (
    row(
        "patch_projection",
        inputs="a",
        hf=("vision_tower.patch_embedder.input_proj.weight", "d a"),
        tunix_head=("vision_encoder.entry.input_projection.w", "a d"),
        deepmind=("vision_encoder/entry/input_projection/w", "a d"),
        maxtext=(f"{_MAXTEXT}/vision_entry/input_projection/kernel", "a d"),
    ),
    row(
        "position_embedding",
        hf=("vision_tower.patch_embedder.position_embedding_table", "g u d"),
        tunix_head=("vision_encoder.entry.pos_emb", "u g d"),
        deepmind=("vision_encoder/entry/pos_emb", "u g d"),
        maxtext=(f"{_MAXTEXT}/vision_entry/pos_emb_param", "u g d"),
    ),
)

ATTENTION = (
    row(
        "q",
        inputs="d",
        hf=(f"{_HF_LAYER}.self_attn.q_proj.linear.weight", "(n h) d"),
        tunix_head=(f"{_TUNIX_LAYER}.attn.q_einsum.w", "n d h"),
        deepmind=(f"{_DEEPMIND_LAYER}/attn/q_einsum/w", "n d h"),
        maxtext=(f"{_MAXTEXT_LAYER}/attention/query/kernel", "d n h"),
    ),
    row(
        "kv",
        inputs="d",
        hf=(f"{_HF_LAYER}.self_attn.{{s:k_proj,v_proj}}.linear.weight", "(k h) d"),
        tunix_head=(f"{_TUNIX_LAYER}.attn.kv_einsum.w", "s k d h"),
        deepmind=(f"{_DEEPMIND_LAYER}/attn/kv_einsum/w", "s k d h"),
        maxtext=(f"{_MAXTEXT_LAYER}/attention/{{s:key,value}}/kernel", "d k h"),
    ),
    row(
        "o",
        inputs="n h",
        hf=(f"{_HF_LAYER}.self_attn.o_proj.linear.weight", "d (n h)"),
        tunix_head=(f"{_TUNIX_LAYER}.attn.attn_vec_einsum.w", "n h d"),
        deepmind=(f"{_DEEPMIND_LAYER}/attn/attn_vec_einsum/w", "n h d"),
        maxtext=(f"{_MAXTEXT_LAYER}/attention/out/kernel", "n h d"),
    ),
    _norm("self_attn.q_norm", "query_norm", "attn", axis="h"),
    _norm("self_attn.k_norm", "key_norm", "attn", axis="h"),
)

FEED_FORWARD = (
    row(
        "gate_up",
        inputs="d",
        hf=(f"{_HF_LAYER}.mlp.{{c:gate_proj,up_proj}}.linear.weight", "f d"),
        tunix_head=(f"{_TUNIX_LAYER}.mlp.gating_einsum.w", "c f d"),
        deepmind=(f"{_DEEPMIND_LAYER}/mlp/gating_einsum/w", "c f d"),
        maxtext=(f"{_MAXTEXT_LAYER}/mlp/{{c:wi_0,wi_1}}/kernel", "d f"),
    ),
    row(
        "down",
        inputs="f",
        hf=(f"{_HF_LAYER}.mlp.down_proj.linear.weight", "d f"),
        tunix_head=(f"{_TUNIX_LAYER}.mlp.linear.w", "f d"),
        deepmind=(f"{_DEEPMIND_LAYER}/mlp/linear/w", "f d"),
        maxtext=(f"{_MAXTEXT_LAYER}/mlp/wo/kernel", "f d"),
    ),
)


def _layer_bounds(name: str, hf: str, jax: str, *, repeated: str = "") -> Row:
    return bounds(
        name,
        f"{_HF_LAYER}.{hf}",
        f"{_TUNIX_LAYER}.{jax}",
        f"{_DEEPMIND_LAYER}/{jax.replace('.', '/')}",
        repeated=repeated,
    )


BOUNDS = (
    _layer_bounds("q", "self_attn.q_proj", "attn.q_einsum"),
    _layer_bounds("kv", "self_attn.{s:k_proj,v_proj}", "attn.kv_einsum", repeated="s"),
    _layer_bounds("o", "self_attn.o_proj", "attn.attn_vec_einsum"),
    _layer_bounds("gate_up", "mlp.{c:gate_proj,up_proj}", "mlp.gating_einsum", repeated="c"),
    _layer_bounds("down", "mlp.down_proj", "mlp.linear"),
)

STANDARDIZE = tuple(
    row(
        f"standardize_{leaf}",
        where=standardizes,
        hf=(f"vision_tower.std_{leaf}", "d"),
        tunix_head=(f"vision_encoder.standardize.{leaf}", "d"),
        deepmind=(f"vision_encoder/standardize/{leaf}", "d"),
        maxtext=(f"{_MAXTEXT}/std_{leaf}", "d"),
    )
    for leaf in ("scale", "bias")
)

PROJECTION = row(
    "projection",
    inputs="d",
    hf=("embed_vision.embedding_projection.weight", "t d"),
    tunix_head=("embedder.mm_input_projection.w", "d t"),
    deepmind=("embedder/mm_input_projection/w", "d t"),
    maxtext=("vision_encoder/Gemma4VisionProjector_0/projection/kernel", "d t"),
)

STACKED = Stacking(
    "vision_encoder/transformer/layer_{i}/",
    (Place("vision_encoder/transformer/stacked_layers/block/{path}", axes="b"),),
    period=1,
)
"""DeepMind's library keeps all layers of this tower in one array, whatever the text model does."""

TOWER = Tower(
    name="gemma4_vision",
    part="vision",
    rows=(
        *ENTRY,
        _norm("input_layernorm", "pre_attention_norm"),
        *ATTENTION,
        _norm("post_attention_layernorm", "post_attention_norm"),
        _norm("pre_feedforward_layernorm", "pre_ffw_norm"),
        *FEED_FORWARD,
        _norm("post_feedforward_layernorm", "post_ffw_norm"),
        *BOUNDS,
        *STANDARDIZE,
        PROJECTION,
    ),
    stacks={"deepmind": STACKED, "deepmind-stacked": STACKED},
    model_types=("gemma4_vision",),
    # Gemma4VisionConfig of transformers 5.12.1.
    defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "patch_size": 16,
        "position_embedding_size": 10240,
        "use_clipped_linears": False,
        "standardize": False,
    },
    sizes=sizes,
    flags=("use_clipped_linears", "standardize"),
)
