"""SigLIP, the vision tower of Gemma 3 4b, 12b and 27b, and the projection behind it.

Sources: transformers 5.12.1 (``SiglipVisionModel``, ``Gemma3MultiModalProjector``), Tunix 0.1.7
(``models/gemma3/vision.py``), DeepMind's library (git 7691fd4, ``gm/nn/vision``), MaxText's
``GEMMA3_MAXTEXT_TO_HF_PARAM_MAPPING`` (git e591f30).
"""

from collections.abc import Mapping
from typing import Any

from gemma_convert.convert.families import common
from gemma_convert.convert.rows import Row, Tower, row
from gemma_convert.convert.sizes import positive, quotient

_HF = "vision_tower.vision_model"
_TUNIX = "vision_encoder.siglip_encoder"
_DEEPMIND = "vision_encoder/siglip_encoder"
_MAXTEXT = "vision_encoder/Gemma3VisionEncoderLayer_0"

_HF_LAYER = f"{_HF}.encoder.layers.{{i}}"
_TUNIX_LAYER = f"{_TUNIX}.transformer.blocks.{{i}}"
_DEEPMIND_LAYER = f"{_DEEPMIND}/Transformer/encoderblock_{{i}}"
_MAXTEXT_LAYER = f"{_MAXTEXT}/Transformer/encoderblock_{{i}}"


def sizes(config: Mapping[str, Any], text_size: int) -> dict[str, int]:
    """Sizes of the axes; a square of patches has a position each."""
    patch = positive(config, "patch_size")
    return {
        "t": text_size,
        "d": positive(config, "hidden_size"),
        "n": positive(config, "num_attention_heads"),
        "h": quotient(config, "hidden_size", "num_attention_heads"),
        "f": positive(config, "intermediate_size"),
        "o": positive(config, "num_channels"),
        "y": patch,
        "x": patch,
        "u": (positive(config, "image_size") // patch) ** 2,
    }


def _norm(name: str, hf: str, tunix: str, flax: str) -> tuple[Row, ...]:
    """Scale and bias of a LayerNorm, by the names of its module."""
    return tuple(
        row(
            f"{name}_{leaf}",
            hf=(f"{hf}.{hf_leaf}", "d"),
            tunix=(f"{tunix}.{leaf}", "d"),
            deepmind=(f"{_DEEPMIND}/{flax}/{leaf}", "d"),
            maxtext=(f"{_MAXTEXT}/{flax}/{leaf}", "d"),
        )
        for leaf, hf_leaf in (("scale", "weight"), ("bias", "bias"))
    )


EMBEDDINGS = (
    row(
        "patch_embedding",
        hf=(f"{_HF}.embeddings.patch_embedding.weight", "d o y x"),
        tunix=(f"{_TUNIX}.embedding.kernel", "y x o d"),
        deepmind=(f"{_DEEPMIND}/embedding/kernel", "y x o d"),
        maxtext=(f"{_MAXTEXT}/embedding/kernel", "y x o d"),
    ),
    row(
        "patch_embedding_bias",
        hf=(f"{_HF}.embeddings.patch_embedding.bias", "d"),
        tunix=(f"{_TUNIX}.embedding.bias", "d"),
        deepmind=(f"{_DEEPMIND}/embedding/bias", "d"),
        maxtext=(f"{_MAXTEXT}/embedding/bias", "d"),
    ),
    row(
        "position_embedding",
        hf=(f"{_HF}.embeddings.position_embedding.weight", "u d"),
        tunix=(f"{_TUNIX}.pos_embedding", "1 u d"),
        deepmind=(f"{_DEEPMIND}/pos_embedding", "1 u d"),
        maxtext=(f"{_MAXTEXT}/pos_embedding", "1 u d"),
    ),
)

_ATTENTION = "MultiHeadDotProductAttention_0"

ATTENTION = (
    row(
        "qkv",
        inputs="d",
        hf=(f"{_HF_LAYER}.self_attn.{{s:q_proj,k_proj,v_proj}}.weight", "(n h) d"),
        tunix=(f"{_TUNIX_LAYER}.attn.{{s:query_proj,key_proj,value_proj}}.kernel", "d (n h)"),
        deepmind=(f"{_DEEPMIND_LAYER}/{_ATTENTION}/{{s:query,key,value}}/kernel", "d n h"),
        maxtext=(f"{_MAXTEXT_LAYER}/{_ATTENTION}/{{s:query,key,value}}/kernel", "d n h"),
    ),
    row(
        "qkv_bias",
        hf=(f"{_HF_LAYER}.self_attn.{{s:q_proj,k_proj,v_proj}}.bias", "(n h)"),
        tunix=(f"{_TUNIX_LAYER}.attn.{{s:query_proj,key_proj,value_proj}}.bias", "(n h)"),
        deepmind=(f"{_DEEPMIND_LAYER}/{_ATTENTION}/{{s:query,key,value}}/bias", "n h"),
        maxtext=(f"{_MAXTEXT_LAYER}/{_ATTENTION}/{{s:query,key,value}}/bias", "n h"),
    ),
    row(
        "o",
        inputs="n h",
        hf=(f"{_HF_LAYER}.self_attn.out_proj.weight", "d (n h)"),
        tunix=(f"{_TUNIX_LAYER}.attn.out_proj.kernel", "(n h) d"),
        deepmind=(f"{_DEEPMIND_LAYER}/{_ATTENTION}/out/kernel", "n h d"),
        maxtext=(f"{_MAXTEXT_LAYER}/{_ATTENTION}/out/kernel", "n h d"),
    ),
    row(
        "o_bias",
        hf=(f"{_HF_LAYER}.self_attn.out_proj.bias", "d"),
        tunix=(f"{_TUNIX_LAYER}.attn.out_proj.bias", "d"),
        deepmind=(f"{_DEEPMIND_LAYER}/{_ATTENTION}/out/bias", "d"),
        maxtext=(f"{_MAXTEXT_LAYER}/{_ATTENTION}/out/bias", "d"),
    ),
)


def _dense(number: int, inputs: str, output: str) -> tuple[Row, Row]:
    """Weight and bias of one layer of the MLP; Hugging Face counts from one, flax from zero."""
    hf, flax = f"fc{number}", f"Dense_{number - 1}"
    weight = row(
        hf,
        inputs=inputs,
        hf=(f"{_HF_LAYER}.mlp.{hf}.weight", f"{output} {inputs}"),
        tunix=(f"{_TUNIX_LAYER}.mlp.{hf}.kernel", f"{inputs} {output}"),
        deepmind=(f"{_DEEPMIND_LAYER}/MlpBlock_0/{flax}/kernel", f"{inputs} {output}"),
        maxtext=(f"{_MAXTEXT_LAYER}/MlpBlockViT_0/{flax}/kernel", f"{inputs} {output}"),
    )
    bias = row(
        f"{hf}_bias",
        hf=(f"{_HF_LAYER}.mlp.{hf}.bias", output),
        tunix=(f"{_TUNIX_LAYER}.mlp.{hf}.bias", output),
        deepmind=(f"{_DEEPMIND_LAYER}/MlpBlock_0/{flax}/bias", output),
        maxtext=(f"{_MAXTEXT_LAYER}/MlpBlockViT_0/{flax}/bias", output),
    )
    return weight, bias


PROJECTION = (
    row(
        "projection",
        inputs="d",
        hf=("multi_modal_projector.mm_input_projection_weight", "d t"),
        tunix=("embedder.mm_input_projection.w", "d t"),
        deepmind=("embedder/mm_input_projection/w", "d t"),
        maxtext=("vision_encoder/VisionEmbedder_0/mm_input_projection/w", "d t"),
    ),
    row(
        "projection_norm",
        hf=("multi_modal_projector.mm_soft_emb_norm.weight", "d"),
        tunix=("embedder.mm_soft_embedding_norm.scale", "d"),
        deepmind=("embedder/mm_soft_embedding_norm/scale", "d"),
        maxtext=("vision_encoder/VisionEmbedder_0/mm_soft_embedding_norm/scale", "d"),
    ).holding(maxtext=common.one_more),
)

_LAYER = "Transformer/encoderblock_{i}"

TOWER = Tower(
    name="siglip",
    part="vision",
    rows=(
        *EMBEDDINGS,
        *_norm("norm1", f"{_HF_LAYER}.layer_norm1", f"{_TUNIX_LAYER}.ln1", f"{_LAYER}/LayerNorm_0"),
        *ATTENTION,
        *_norm("norm2", f"{_HF_LAYER}.layer_norm2", f"{_TUNIX_LAYER}.ln2", f"{_LAYER}/LayerNorm_1"),
        *_dense(1, "d", "f"),
        *_dense(2, "f", "d"),
        *_norm(
            "post_norm",
            f"{_HF}.post_layernorm",
            f"{_TUNIX}.transformer.encoder_norm",
            "Transformer/encoder_norm",
        ),
        *PROJECTION,
    ),
    model_types=("siglip_vision_model",),
    # SiglipVisionConfig of transformers 5.12.1.
    defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 16,
    },
    sizes=sizes,
    shortened=("vision_tower.vision_model.", "vision_tower."),
)
