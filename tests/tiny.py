"""Tiny models of the true architectures, in transformers and in Tunix, and their logits.

Sizes are distinct, heads are grouped, a global layer has sizes of its own in Gemma 4, and every
parameter is random: no norm of ones, no scalar of one. Seven layers, because Tunix's Gemma 3 has
its first global layer at index 5 whatever its config says. Weights are scaled so that the logits
are of order one and float32 agrees with float64 to 1e-5; deep and narrow random models otherwise
amplify rounding by a thousand.

transformers, torch, jax and Tunix are imported by the functions, not by this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array

FAMILIES = ("gemma3", "gemma4")
WINDOW = 5
IDS = np.random.default_rng(7).integers(3, 509, 13).tolist()
"""Token ids, well beyond the sliding window."""

HF_SIZES: dict[str, Any] = {
    "vocab_size": 509,
    "hidden_size": 60,  # transformers wants a multiple of the number of heads
    "intermediate_size": 88,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "sliding_window": WINDOW,
    "max_position_embeddings": 64,
}
HF_OWN: dict[str, dict[str, Any]] = {
    "gemma3": {"query_pre_attn_scalar": 14},
    "gemma4": {
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 2,
        "num_global_key_value_heads": 2,
        "global_head_dim": 22,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
}
TUNIX_SIZES: dict[str, Any] = {
    "num_layers": 7,
    "num_embed": 509,
    "embed_dim": 60,
    "hidden_dim": 88,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 14,
    "sliding_window_size": WINDOW,
    "local_base_frequency": 10_000,
    "global_base_frequency": 1_000_000,
}
TUNIX_OWN: dict[str, dict[str, Any]] = {
    "gemma3": {"param_dtype": np.float32},
    "gemma4": {"num_global_kv_heads": 2, "global_key_size": 22, "k_eq_v_global": True},
}


def hf_config(family: str) -> Any:
    """The transformers config of the tiny model."""
    import transformers

    config_class = {
        "gemma3": transformers.Gemma3TextConfig,
        "gemma4": transformers.Gemma4TextConfig,
    }[family]
    return config_class(**{**HF_SIZES, **HF_OWN[family]})


def hf_model(family: str, seed: int = 0) -> Any:
    """The tiny model of transformers in float32, every parameter and layer scalar random."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config(family)).eval()
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in hf_weights(model):
            values = _random_values(random, name, tuple(weight.shape), weight.shape[-1])
            weight.copy_(torch.from_numpy(values))
    return model


def hf_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Name and torch tensor of everything that transformers stores of ``model``, once each."""
    yield from model.named_parameters()
    yield from ((n, b) for n, b in model.named_buffers() if n.endswith("layer_scalar"))


def hf_logits(model: Any, *, double: bool = False) -> Array:
    """Logits (tokens, v) of `IDS` by transformers, without a cache; in float64 if ``double``."""
    import torch

    torch.set_num_threads(1)  # threads would only wait for each other at this size
    model.to(torch.float64 if double else torch.float32)
    with torch.inference_mode():
        logits: Array = model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    model.to(torch.float32)
    return logits


def hf_loaded(directory: Path) -> Any:
    """The model that transformers loads from a directory: every weight found, no other there."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def tunix_model(family: str, seed: int = 0) -> Any:
    """Tunix's tiny model in float32, every parameter random."""
    from flax import nnx
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma4 import model as gemma4

    config: Any
    if family == "gemma3":
        model_class, config = gemma3.Gemma3, gemma3.ModelConfig(**TUNIX_SIZES, **TUNIX_OWN[family])
    else:
        local, full = gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL
        pattern = (local,) * 5 + (full,) * 2
        config = gemma4.ModelConfig(**TUNIX_SIZES, **TUNIX_OWN[family], attention_pattern=pattern)
        model_class = gemma4.Gemma4
    # Shapes alone: Tunix's own random values would be compiled one by one, for seconds.
    model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
    randomise_tunix(model, seed)
    return model


def randomise_tunix(model: Any, seed: int) -> None:
    """Give every parameter of Tunix's ``model`` new random values."""
    import jax.numpy as jnp
    from flax import nnx

    random = np.random.default_rng(seed)
    state = nnx.state(model)
    for path, leaf in nnx.to_flat_state(state):
        name, shape = ".".join(map(str, path)), leaf.shape
        inputs = shape[-1] if "input_embedding" in name else shape[-2] if len(shape) > 1 else 1
        if "attn_vec_einsum" in name:  # (n, h, d): two axes are contracted
            inputs *= shape[0]
        leaf.set_value(jnp.asarray(_random_values(random, name, shape, inputs)))
    nnx.update(model, state)


def tunix_logits(model: Any) -> Array:
    """Tunix's float32 logits (tokens, v) of `IDS`, without a cache."""
    import jax
    import jax.numpy as jnp

    count = len(IDS)
    causal = jnp.tril(jnp.ones((1, count, count), bool))
    with jax.default_matmul_precision("highest"):
        logits, _ = model(jnp.asarray([IDS]), jnp.arange(count)[None], None, causal)
    return np.asarray(logits[0])


def tunix_arrays(model: Any) -> dict[str, Array]:
    """Every parameter of Tunix's ``model`` by its dotted path."""
    from flax import nnx

    return {
        ".".join(map(str, path)): np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    }


def tunix_restore(model: Any, root: Path) -> None:
    """Let Tunix's own manager restore ``root``'s newest step into ``model``."""
    from tunix.sft.checkpoint_manager import CheckpointManager

    manager = CheckpointManager(str(root))
    manager.maybe_restore(model)
    manager.close()


def tunix_save(model: Any, root: Path, step: int) -> None:
    """Let Tunix's own manager save all of ``model``."""
    from tunix.sft.checkpoint_manager import CheckpointManager

    manager = CheckpointManager(str(root))
    manager.save(step, model, force=True)
    manager.close()


def _random_values(
    random: np.random.Generator, name: str, shape: tuple[int, ...], inputs: int
) -> Array:
    """Matrices keep the size of what they multiply; norms and scalars are off zero and off one."""
    if len(shape) > 1:
        mean, deviation = 0.0, inputs**-0.5
    elif name.endswith(("layer_scalar", "skip_scale", "skip_scale.value")):
        mean, deviation = 0.8, 0.1
    else:
        mean, deviation = 0.3, 0.2
    return random.normal(mean, deviation, shape).astype(np.float32)
