"""Rows that several generations of Gemma share.

Sources: the parameter trees of transformers 5.12.1 and Tunix 0.1.7; every row is checked by the
forward passes of both (tests/convert/test_logits.py).
"""

from collections.abc import Mapping

import numpy as np

from gemma_convert.convert.rows import Layer, Row, row
from gemma_convert.convert.stacking import Place, Stacking
from gemma_convert.convert.values import AS_IT_IS, Affine


def fuses_qkv(layer: Layer) -> bool:
    """Gemma 1 to 3 in JAX: as many key/value heads as query heads are stored as one array."""
    return layer.sizes["n"] == layer.sizes["k"]


def splits_q(layer: Layer) -> bool:
    """The opposite of `fuses_qkv`."""
    return not fuses_qkv(layer)


def one_more(layer: Layer, at: Mapping[str, int]) -> Affine:
    """MaxText stores a norm of Gemma 1 to 3 as what it multiplies by, 1 + w.

    Source: ``scale_rmsnorm`` in MaxText's checkpoint_conversion/utils/param_mapping.py, git
    e591f30. Gemma 4 multiplies by w itself everywhere.
    """
    return Affine(offset=1.0)


def times_root(layer: Layer, at: Mapping[str, int]) -> Affine:
    """MaxText stores the embedding times the root of the hidden size, taken in float32.

    Source: ``pad_hf_embedding_layer`` of Gemma 2 and 4, same file.
    """
    return Affine(float(np.float32(layer.sizes["d"] ** 0.5)))


def scaled_query(layer: Layer, at: Mapping[str, int]) -> Affine:
    """MaxText's Gemma 1 and 2 do not scale queries: the scale lies in the projection.

    Its converters disagree for the 27b: ``convert_gemma2_chkpt.py`` folds 144 ** -0.5, as the model
    is, but ``scale_query_layer`` in param_mapping.py folds head_dim ** -0.5, which is 128 ** -0.5.
    Here it is what the config's query_pre_attn_scalar says: the logits are then the same.
    """
    return Affine(layer.query_scale) if at.get("s", 0) == 0 else AS_IT_IS


EMBEDDING = row(
    "embedding",
    inputs="v",
    lookup=True,
    hf=("embed_tokens.weight", "v d"),
    tunix=("embedder.input_embedding", "v d"),
    deepmind=("embedder/input_embedding", "v d"),
    maxtext=("token_embedder/embedding", "v d"),
)

FINAL_NORM = row(
    "final_norm",
    hf=("norm.weight", "d"),
    tunix=("final_norm.scale", "d"),
    deepmind=("final_norm/scale", "d"),
    maxtext=("decoder/decoder_norm/scale", "d"),
)

QUERY = row(
    "q",
    inputs="d",
    hf=("layers.{i}.self_attn.q_proj.weight", "(n h) d"),
    tunix=("layers.{i}.attn.q_einsum.w", "n d h"),
    deepmind=("layer_{i}/attn/q_einsum/w", "n d h"),
    maxtext=("decoder/layers_{i}/self_attention/query/kernel", "d n h"),
)

KEY_AND_VALUE = row(
    "kv",
    inputs="d",
    hf=("layers.{i}.self_attn.{s:k_proj,v_proj}.weight", "(k h) d"),
    tunix=("layers.{i}.attn.kv_einsum.w", "s k d h"),
    deepmind=("layer_{i}/attn/kv_einsum/w", "s k d h"),
    maxtext=("decoder/layers_{i}/self_attention/{s:key,value}/kernel", "d k h"),
)

QUERY_KEY_VALUE = row(
    "qkv",
    inputs="d",
    where=fuses_qkv,
    hf=("layers.{i}.self_attn.{s:q_proj,k_proj,v_proj}.weight", "(n h) d"),
    tunix=("layers.{i}.attn.qkv_einsum.w", "s n d h"),
    deepmind=("layer_{i}/attn/qkv_einsum/w", "s n d h"),
    maxtext=("decoder/layers_{i}/self_attention/{s:query,key,value}/kernel", "d n h"),
)

OUTPUT = row(
    "o",
    inputs="n h",
    hf=("layers.{i}.self_attn.o_proj.weight", "d (n h)"),
    tunix=("layers.{i}.attn.attn_vec_einsum.w", "n h d"),
    deepmind=("layer_{i}/attn/attn_vec_einsum/w", "n h d"),
    maxtext=("decoder/layers_{i}/self_attention/out/kernel", "n h d"),
)

ATTENTION = (QUERY.only(splits_q), KEY_AND_VALUE.only(splits_q), QUERY_KEY_VALUE, OUTPUT)
"""Attention of Gemma 1 to 3."""

SCALED_ATTENTION = (
    QUERY.only(splits_q).holding(maxtext=scaled_query),
    KEY_AND_VALUE.only(splits_q),
    QUERY_KEY_VALUE.holding(maxtext=scaled_query),
    OUTPUT,
)
"""Attention of Gemma 1 and 2, whose scale MaxText keeps in the query projection."""

QUERY_NORM = row(
    "q_norm",
    hf=("layers.{i}.self_attn.q_norm.weight", "h"),
    tunix=("layers.{i}.attn._query_norm.scale", "h"),
    deepmind=("layer_{i}/attn/_query_norm/scale", "h"),
    maxtext=("decoder/layers_{i}/self_attention/query_norm/scale", "h"),
)

KEY_NORM = row(
    "k_norm",
    hf=("layers.{i}.self_attn.k_norm.weight", "h"),
    tunix=("layers.{i}.attn._key_norm.scale", "h"),
    deepmind=("layer_{i}/attn/_key_norm/scale", "h"),
    maxtext=("decoder/layers_{i}/self_attention/key_norm/scale", "h"),
)

GATE_AND_UP = row(
    "gate_up",
    inputs="d",
    hf=("layers.{i}.mlp.{c:gate_proj,up_proj}.weight", "f d"),
    tunix=("layers.{i}.mlp.{c:gate_proj,up_proj}.kernel", "d f"),
    deepmind=("layer_{i}/mlp/gating_einsum", "c f d"),
    maxtext=("decoder/layers_{i}/mlp/{c:wi_0,wi_1}/kernel", "d f"),
)

# The library's transpose_gating_einsum is off for Gemma 1 and the 2b of Gemma 2.
OLD_GATE_AND_UP = GATE_AND_UP.spelled(deepmind=("layer_{i}/mlp/gating_einsum", "c d f"))

DOWN = row(
    "down",
    inputs="f",
    hf=("layers.{i}.mlp.down_proj.weight", "d f"),
    tunix=("layers.{i}.mlp.down_proj.kernel", "f d"),
    deepmind=("layer_{i}/mlp/linear", "f d"),
    maxtext=("decoder/layers_{i}/mlp/wo/kernel", "f d"),
)


def norm(hf: str, tunix: str, deepmind: str = "", *, maxtext: str) -> Row:
    """The row of a per-layer norm over the hidden size, by its names; DeepMind's as Tunix's."""
    return row(
        tunix,
        hf=(f"layers.{{i}}.{hf}.weight", "d"),
        tunix=(f"layers.{{i}}.{tunix}.scale", "d"),
        deepmind=(f"layer_{{i}}/{deepmind or tunix}/scale", "d"),
        maxtext=(f"decoder/layers_{{i}}/{maxtext}/scale", "d"),
    )


PRE_ATTENTION_NORM = norm(
    "input_layernorm", "pre_attention_norm", maxtext="pre_self_attention_norm"
)
POST_ATTENTION_NORM = norm(
    "post_attention_layernorm", "post_attention_norm", maxtext="post_self_attention_norm"
)
PRE_FFW_NORM = norm("pre_feedforward_layernorm", "pre_ffw_norm", maxtext="pre_ffw_norm")
POST_FFW_NORM = norm("post_feedforward_layernorm", "post_ffw_norm", maxtext="post_ffw_norm")


def offset(*norms: Row) -> tuple[Row, ...]:
    """Norms that multiply by 1 + w; see `one_more`."""
    return tuple(row.holding(maxtext=one_more) for row in norms)


BY_POSITION = Stacking(
    "layer_{i}/", (Place("stacked_layers/attention_type_{j}/{path}", axes="b"),), axis=0
)
"""DeepMind's STACKED trees (gemma git 7691fd4, gm/ckpts/_compat.py): a position of all blocks in
one array, of the last block too if it is not whole."""
