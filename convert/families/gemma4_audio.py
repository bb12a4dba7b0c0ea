"""The audio tower of Gemma 4 E2B and E4B, a conformer, and the projection behind it.

Sources: transformers 5.12.1 (``Gemma4AudioModel``), Tunix git c7d8950, DeepMind's library (git
7691fd4). Tunix 0.1.7 and MaxText have none.
"""

from collections.abc import Mapping
from typing import Any

from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.families.gemma4_vision import bounds
from gemma_convert.convert.rows import Row, Tower, row
from gemma_convert.convert.sizes import positive, quotient

_HF = "audio_tower"
_TUNIX = "audio_encoder"
_DEEPMIND = "audio_encoder"
_HF_LAYER = f"{_HF}.layers.{{i}}"
_TUNIX_LAYER = f"{_TUNIX}.conformer_layers.{{i}}"
_DEEPMIND_LAYER = f"{_DEEPMIND}/conformer/stacked_layers_{{i}}"


def sizes(config: Mapping[str, Any], text_size: int) -> dict[str, int]:
    """Sizes of the axes.

    There are as many frequencies as channels of the first convolution, and each of the two
    convolutions halves them (``Gemma4AudioSubSampleConvProjection``).
    """
    channels = config["subsampling_conv_channels"]
    if not isinstance(channels, list | tuple) or len(channels) != 2:
        raise ConfigError(
            f"config.json: subsampling_conv_channels is {channels!r}, expected two numbers"
        )
    first, second = ({"subsampling_conv_channels": size} for size in channels)
    d = positive(config, "hidden_size")
    return {
        "t": text_size,
        "d": d,
        "ch": d,
        "n": positive(config, "num_attention_heads"),
        "h": quotient(config, "hidden_size", "num_attention_heads"),
        "f": 4 * d,
        "o": positive(first, "subsampling_conv_channels"),
        "z": positive(second, "subsampling_conv_channels"),
        "q": positive(first, "subsampling_conv_channels") // 4,
        "y": 3,
        "x": 3,
        "tap": positive(config, "conv_kernel_size"),
        "j": positive(config, "output_proj_dims"),
    }


def _outside(name: str, hf: tuple[str, str], jax: tuple[str, str], *, inputs: str = "") -> Row:
    """A row outside the layers; the JAX layouts differ in the separator."""
    return row(
        name,
        inputs=inputs,
        hf=(f"{_HF}.{hf[0]}", hf[1]),
        tunix_head=(f"{_TUNIX}.{jax[0]}", jax[1]),
        deepmind=(f"{_DEEPMIND}/{jax[0].replace('.', '/')}", jax[1]),
    )


def _inside(name: str, hf: tuple[str, str], jax: tuple[str, str], *, inputs: str = "") -> Row:
    """A row of a layer."""
    return row(
        name,
        inputs=inputs,
        hf=(f"{_HF_LAYER}.{hf[0]}", hf[1]),
        tunix_head=(f"{_TUNIX_LAYER}.{jax[0]}", jax[1]),
        deepmind=(f"{_DEEPMIND_LAYER}/{jax[0].replace('.', '/')}", jax[1]),
    )


def _norm(hf: str, jax: str, axis: str = "d") -> Row:
    return _inside(jax, (f"{hf}.weight", axis), (f"{jax}.scale", axis))


def _linear(
    name: str, hf: tuple[str, str], jax: tuple[str, str], *, inputs: str
) -> tuple[Row, Row]:
    """Kernel and clip bounds of a linear layer, by module and axes in both worlds."""
    clip = bounds(
        name,
        f"{_HF_LAYER}.{hf[0]}",
        f"{_TUNIX_LAYER}.{jax[0]}",
        f"{_DEEPMIND_LAYER}/{jax[0].replace('.', '/')}",
    )
    weight = (f"{hf[0]}.linear.weight", hf[1])
    return _inside(name, weight, (f"{jax[0]}.kernel", jax[1]), inputs=inputs), clip


SUBSAMPLING = (
    _outside(
        "subsampling_0",
        ("subsample_conv_projection.layer0.conv.weight", "o 1 y x"),
        ("feature.subsampling_0.kernel", "y x 1 o"),
    ),
    _outside(
        "subsampling_norm_0",
        ("subsample_conv_projection.layer0.norm.weight", "o"),
        ("feature.norm_0.scale", "o"),
    ),
    _outside(
        "subsampling_1",
        ("subsample_conv_projection.layer1.conv.weight", "z o y x"),
        ("feature.subsampling_1.kernel", "y x o z"),
    ),
    _outside(
        "subsampling_norm_1",
        ("subsample_conv_projection.layer1.norm.weight", "z"),
        ("feature.norm_1.scale", "z"),
    ),
    _outside(
        "input_projection",
        ("subsample_conv_projection.input_proj_linear.weight", "d (q z)"),
        ("feature.input_proj.kernel", "q z d"),
        inputs="q z",
    ),
)


def _feed_forward(hf: str, jax: str) -> tuple[Row, ...]:
    """One of the two half-step feed-forward modules of a conformer."""
    return (
        _norm(f"{hf}.pre_layer_norm", f"{jax}.pre_layer_norm"),
        *_linear(
            f"{jax}_1", (f"{hf}.ffw_layer_1", "f d"), (f"{jax}.ffn_layer1", "d f"), inputs="d"
        ),
        *_linear(
            f"{jax}_2", (f"{hf}.ffw_layer_2", "d f"), (f"{jax}.ffn_layer2", "f d"), inputs="f"
        ),
        _norm(f"{hf}.post_layer_norm", f"{jax}.post_layer_norm"),
    )


_SELF = "trans_atten.self_atten"

ATTENTION = (
    _norm("norm_pre_attn", "trans_atten.pre_norm"),
    *_linear("q", ("self_attn.q_proj", "(n h) d"), (f"{_SELF}.query", "d (n h)"), inputs="d"),
    *_linear("k", ("self_attn.k_proj", "(n h) d"), (f"{_SELF}.key", "d (n h)"), inputs="d"),
    *_linear("v", ("self_attn.v_proj", "(n h) d"), (f"{_SELF}.value", "d (n h)"), inputs="d"),
    _inside("per_dim_scale", ("self_attn.per_dim_scale", "h"), (f"{_SELF}.per_dim_scale", "h")),
    _inside(
        "relative_k",
        ("self_attn.relative_k_proj.weight", "(n h) d"),
        (f"{_SELF}.relative_position_embedding.pos_proj.kernel", "d n h"),
        inputs="d",
    ),
    *_linear("o", ("self_attn.post", "d (n h)"), ("trans_atten.post", "n h d"), inputs="n h"),
    _norm("norm_post_attn", "trans_atten.post_norm"),
)

CONVOLUTION = (
    _norm("lconv1d.pre_layer_norm", "lconv.ln"),
    *_linear(
        "lconv_start",
        ("lconv1d.linear_start", "(c ch) d"),
        ("lconv.linear_start", "d (c ch)"),
        inputs="d",
    ),
    _inside(
        "depthwise",
        ("lconv1d.depthwise_conv1d.weight", "ch 1 tap"),
        ("lconv.depthwise_conv1d.kernel", "tap 1 ch"),
    ),
    _norm("lconv1d.conv_norm", "lconv.conv_norm", "ch"),
    *_linear(
        "lconv_end", ("lconv1d.linear_end", "d ch"), ("lconv.linear_end", "ch d"), inputs="ch"
    ),
)

OUTPUT = (
    _outside(
        "output", ("output_proj.weight", "j d"), ("output_projection.kernel", "d j"), inputs="d"
    ),
    _outside("output_bias", ("output_proj.bias", "j"), ("output_projection.bias", "j")),
)

PROJECTION = row(
    "projection",
    inputs="j",
    hf=("embed_audio.embedding_projection.weight", "t j"),
    tunix_head=("embedder.audio_input_projection.w", "j t"),
    deepmind=("embedder/audio_input_projection/w", "j t"),
)

TOWER = Tower(
    name="gemma4_audio",
    part="audio",
    rows=(
        *SUBSAMPLING,
        *_feed_forward("feed_forward1", "fflayer_start"),
        *ATTENTION,
        *CONVOLUTION,
        *_feed_forward("feed_forward2", "fflayer_end"),
        _norm("norm_out", "final_ln"),
        *OUTPUT,
        PROJECTION,
    ),
    model_types=("gemma4_audio",),
    # Gemma4AudioConfig of transformers 5.12.1.
    defaults={
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "subsampling_conv_channels": [128, 32],
        "conv_kernel_size": 5,
        "output_proj_dims": 1536,
        "use_clipped_linears": True,
    },
    sizes=sizes,
    flags=("use_clipped_linears",),
)
