"""The law of the towers' layouts written out in numpy, apart from the package.

For Gemma 3's SigLIP it is what Tunix 0.1.7 does when it loads Hugging Face's weights (its position
table aside, whose first axis it forgets) and what DeepMind's flax modules hold; for Gemma 4 it is
what the trees of DeepMind's library (git 7691fd4) and of Tunix (git c7d8950) hold. Hugging Face's
linear layers are (out, in), its convolutions (out, in, height, width).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array

Values = Mapping[str, Array]
Made = dict[str, Array]


def siglip(hf: Values, config: Mapping[str, Any], layout: str) -> Made:
    """SigLIP and its projection; names of ``hf`` as on the Hub."""
    vision = config["vision_config"]
    heads = vision["num_attention_heads"]
    tower, projector = "vision_tower.vision_model.", "multi_modal_projector."
    root = "vision_encoder/siglip_encoder/"
    if layout == "maxtext":
        root = "vision_encoder/Gemma3VisionEncoderLayer_0/"
    made = {
        root + "embedding/kernel": hf[tower + "embeddings.patch_embedding.weight"].transpose(
            2, 3, 1, 0
        ),
        root + "embedding/bias": hf[tower + "embeddings.patch_embedding.bias"],
        root + "pos_embedding": hf[tower + "embeddings.position_embedding.weight"][None],
    }
    stack = root + ("transformer/" if layout == "tunix" else "Transformer/")
    made[stack + "encoder_norm/scale"] = hf[tower + "post_layernorm.weight"]
    made[stack + "encoder_norm/bias"] = hf[tower + "post_layernorm.bias"]
    for i in range(vision["num_hidden_layers"]):
        layer = _siglip_layer(hf, f"{tower}encoder.layers.{i}.", heads, layout)
        block = f"{stack}blocks/{i}/" if layout == "tunix" else f"{stack}encoderblock_{i}/"
        made |= {block + name: array for name, array in layer.items()}
    norm = hf[projector + "mm_soft_emb_norm.weight"]
    if layout == "maxtext":  # bfloat16 of a sum in float32, as of the text model's norms
        norm = (norm.astype(np.float32) + np.float32(1)).astype(norm.dtype)
    embedder = "vision_encoder/VisionEmbedder_0/" if layout == "maxtext" else "embedder/"
    made[embedder + "mm_input_projection/w"] = hf[projector + "mm_input_projection_weight"]
    made[embedder + "mm_soft_embedding_norm/scale"] = norm
    return made


def _siglip_layer(hf: Values, layer: str, heads: int, layout: str) -> Made:
    tunix = layout == "tunix"
    mlp = {"tunix": "mlp/", "deepmind": "MlpBlock_0/", "maxtext": "MlpBlockViT_0/"}[layout]
    made: Made = {}
    for number in (1, 2):
        norm, jax = (
            f"{layer}layer_norm{number}.",
            f"ln{number}/" if tunix else f"LayerNorm_{number - 1}/",
        )
        made[jax + "scale"], made[jax + "bias"] = hf[norm + "weight"], hf[norm + "bias"]
        dense = mlp + (f"fc{number}/" if tunix else f"Dense_{number - 1}/")
        made[dense + "kernel"] = hf[f"{layer}mlp.fc{number}.weight"].T
        made[dense + "bias"] = hf[f"{layer}mlp.fc{number}.bias"]
    attention = "attn/" if tunix else "MultiHeadDotProductAttention_0/"
    for word, short in (("query", "q"), ("key", "k"), ("value", "v")):
        weight = hf[f"{layer}self_attn.{short}_proj.weight"]
        bias = hf[f"{layer}self_attn.{short}_proj.bias"]
        if tunix:
            made[f"{attention}{word}_proj/kernel"], made[f"{attention}{word}_proj/bias"] = (
                weight.T,
                bias,
            )
        else:
            made[f"{attention}{word}/kernel"] = weight.T.reshape(weight.shape[1], heads, -1)
            made[f"{attention}{word}/bias"] = bias.reshape(heads, -1)
    out = hf[f"{layer}self_attn.out_proj.weight"].T
    name = attention + ("out_proj/" if tunix else "out/")
    made[name + "kernel"] = out if tunix else out.reshape(heads, -1, out.shape[1])
    made[name + "bias"] = hf[f"{layer}self_attn.out_proj.bias"]
    return made


def gemma4_vision(hf: Values, config: Mapping[str, Any], layout: str) -> Made:
    """Gemma 4's vision tower and its projection."""
    vision, tower = config["vision_config"], "model.vision_tower."
    layers = [
        _gemma4_layer(hf, f"{tower}encoder.layers.{i}.", vision, layout)
        for i in range(vision["num_hidden_layers"])
    ]
    patches = hf[tower + "patch_embedder.input_proj.weight"].T
    positions = hf[tower + "patch_embedder.position_embedding_table"].transpose(1, 0, 2)
    projection = hf["model.embed_vision.embedding_projection.weight"].T
    standard = {
        leaf: hf[f"{tower}std_{leaf}"] for leaf in ("scale", "bias") if vision.get("standardize")
    }
    if layout == "maxtext":
        root = "vision_encoder/Gemma4VisionEncoderLayer_0/"
        return {
            root + "vision_entry/input_projection/kernel": patches,
            root + "vision_entry/pos_emb_param": positions,
            "vision_encoder/Gemma4VisionProjector_0/projection/kernel": projection,
            **{f"{root}std_{leaf}": array for leaf, array in standard.items()},
            **{
                f"{root}layer_{i}/{n}": a
                for i, layer in enumerate(layers)
                for n, a in layer.items()
            },
        }
    made = {
        "vision_encoder/entry/input_projection/w": patches,
        "vision_encoder/entry/pos_emb": positions,
        "embedder/mm_input_projection/w": projection,
        **{f"vision_encoder/standardize/{leaf}": array for leaf, array in standard.items()},
    }
    if layout == "tunix":
        return made | {
            f"vision_encoder/layers/{i}/{n}": a
            for i, layer in enumerate(layers)
            for n, a in layer.items()
        }
    block = "vision_encoder/transformer/stacked_layers/block/"
    return made | {block + n: np.stack([layer[n] for layer in layers]) for n in layers[0]}


def _gemma4_layer(hf: Values, layer: str, vision: Mapping[str, Any], layout: str) -> Made:
    h = vision["head_dim"]
    linear = {
        name: hf[f"{layer}{name}.linear.weight"]
        for name in (
            *(f"self_attn.{letter}_proj" for letter in "qkvo"),
            *(f"mlp.{word}_proj" for word in ("gate", "up", "down")),
        )
    }
    q, k, v, o, gate, up, down = linear.values()
    norms = {
        "pre_attention_norm/scale": hf[layer + "input_layernorm.weight"],
        "post_attention_norm/scale": hf[layer + "post_attention_layernorm.weight"],
        "pre_ffw_norm/scale": hf[layer + "pre_feedforward_layernorm.weight"],
        "post_ffw_norm/scale": hf[layer + "post_feedforward_layernorm.weight"],
    }
    attn = "attention/" if layout == "maxtext" else "attn/"
    norms[attn + "query_norm/scale"] = hf[layer + "self_attn.q_norm.weight"]
    norms[attn + "key_norm/scale"] = hf[layer + "self_attn.k_norm.weight"]
    out = o.reshape(o.shape[0], -1, h).transpose(1, 2, 0)
    if layout == "maxtext":
        words = zip(("query", "key", "value"), (q, k, v), strict=True)
        return norms | {
            **{f"attention/{word}/kernel": w.T.reshape(w.shape[1], -1, h) for word, w in words},
            "attention/out/kernel": out,
            "mlp/wi_0/kernel": gate.T,
            "mlp/wi_1/kernel": up.T,
            "mlp/wo/kernel": down.T,
        }
    q, k, v = (w.reshape(-1, h, w.shape[1]).transpose(0, 2, 1) for w in (q, k, v))
    return norms | {
        "attn/q_einsum/w": q,
        "attn/kv_einsum/w": np.stack([k, v]),
        "attn/attn_vec_einsum/w": out,
        "mlp/gating_einsum/w": np.stack([gate, up]),
        "mlp/linear/w": down.T,
        **(_vision_bounds(hf, layer) if vision.get("use_clipped_linears") else {}),
    }


def _bounds(hf: Values, linear: str, jax: str) -> Made:
    return {
        f"{jax}/clip_{side}_{end}": hf[f"{linear}.{side}_{end}"]
        for side in ("input", "output")
        for end in ("min", "max")
    }


def _vision_bounds(hf: Values, layer: str) -> Made:
    einsums = {
        "attn/q_einsum": "self_attn.q_proj",
        "attn/kv_einsum": "self_attn.k_proj",  # v_proj has the same
        "attn/attn_vec_einsum": "self_attn.o_proj",
        "mlp/gating_einsum": "mlp.gate_proj",  # up_proj has the same
        "mlp/linear": "mlp.down_proj",
    }
    made: Made = {}
    for jax, linear in einsums.items():
        made |= _bounds(hf, layer + linear, jax)
    return made


def gemma4_audio(hf: Values, config: Mapping[str, Any], layout: str) -> Made:
    """Gemma 4's audio tower and its projection."""
    audio, tower = config["audio_config"], "model.audio_tower."
    entry = tower + "subsample_conv_projection."
    channels = audio["subsampling_conv_channels"]
    made = {
        "embedder/audio_input_projection/w": hf["model.embed_audio.embedding_projection.weight"].T
    }
    feature = "audio_encoder/feature/"
    for i in (0, 1):
        made[f"{feature}subsampling_{i}/kernel"] = hf[f"{entry}layer{i}.conv.weight"].transpose(
            2, 3, 1, 0
        )
        made[f"{feature}norm_{i}/scale"] = hf[f"{entry}layer{i}.norm.weight"]
    inputs = hf[entry + "input_proj_linear.weight"]
    made[feature + "input_proj/kernel"] = inputs.reshape(
        len(inputs), channels[0] // 4, channels[1]
    ).transpose(1, 2, 0)
    made["audio_encoder/output_projection/kernel"] = hf[tower + "output_proj.weight"].T
    made["audio_encoder/output_projection/bias"] = hf[tower + "output_proj.bias"]
    for i in range(audio["num_hidden_layers"]):
        block = "conformer_layers/" if layout == "tunix" else "conformer/stacked_layers_"
        layer = _conformer(hf, f"{tower}layers.{i}.", audio["num_attention_heads"])
        made |= {f"audio_encoder/{block}{i}/{name}": array for name, array in layer.items()}
    return made


def _conformer(hf: Values, layer: str, heads: int) -> Made:
    made: Made = {}

    def linear(name: str, jax: str, change: Callable[[Array], Array] = np.transpose) -> None:
        made[f"{jax}/kernel"] = change(hf[f"{layer}{name}.linear.weight"])
        made.update(_bounds(hf, layer + name, jax))

    def norm(name: str, jax: str) -> None:
        made[f"{jax}/scale"] = hf[f"{layer}{name}.weight"]

    for name, jax in (("feed_forward1", "fflayer_start"), ("feed_forward2", "fflayer_end")):
        linear(f"{name}.ffw_layer_1", f"{jax}/ffn_layer1")
        linear(f"{name}.ffw_layer_2", f"{jax}/ffn_layer2")
        norm(f"{name}.pre_layer_norm", f"{jax}/pre_layer_norm")
        norm(f"{name}.post_layer_norm", f"{jax}/post_layer_norm")
    inner = "trans_atten/self_atten"
    for letter, word in (("q", "query"), ("k", "key"), ("v", "value")):
        linear(f"self_attn.{letter}_proj", f"{inner}/{word}")
    linear("self_attn.post", "trans_atten/post", lambda w: w.T.reshape(heads, -1, w.shape[0]))
    relative = hf[layer + "self_attn.relative_k_proj.weight"]
    made[f"{inner}/relative_position_embedding/pos_proj/kernel"] = relative.T.reshape(
        relative.shape[1], heads, -1
    )
    made[f"{inner}/per_dim_scale"] = hf[layer + "self_attn.per_dim_scale"]
    norm("norm_pre_attn", "trans_atten/pre_norm")
    norm("norm_post_attn", "trans_atten/post_norm")
    linear("lconv1d.linear_start", "lconv/linear_start")
    linear("lconv1d.linear_end", "lconv/linear_end")
    norm("lconv1d.pre_layer_norm", "lconv/ln")
    norm("lconv1d.conv_norm", "lconv/conv_norm")
    depthwise = hf[layer + "lconv1d.depthwise_conv1d.weight"]
    made["lconv/depthwise_conv1d/kernel"] = depthwise.transpose(2, 1, 0)
    norm("norm_out", "final_ln")
    return made


def towers(hf: Values, config: Mapping[str, Any], layout: str) -> Made:
    """All towers of a model in tunix, deepmind or maxtext; keys separated by ``/``."""
    if config["model_type"] == "gemma3":
        return siglip(hf, config, layout)
    made = gemma4_vision(hf, config, layout)
    return made | (gemma4_audio(hf, config, layout) if config.get("audio_config") else {})
