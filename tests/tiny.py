"""Tiny models of the true architectures, in transformers and in Tunix, and their logits.

The cases are those of tests/tiny_cases.py. Every parameter is random: no norm of ones, no scalar
of one. Weights are scaled so that the logits are of order one and float32 agrees with float64 to
1e-5; deep and narrow random models otherwise amplify rounding by a thousand.

transformers, torch, jax and Tunix are imported by the functions, not by this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gemma_convert.convert.tensor import Array
from tests.tiny_cases import CASES

IDS = np.random.default_rng(7).integers(3, 509, 13).tolist()
"""Token ids, well beyond the sliding window."""

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""Only the eager attention of transformers caps the scores of Gemma 2, and only its eager experts
work in float64 and at any size."""


def hf_config(case: str) -> Any:
    """The transformers config of the tiny model."""
    import transformers

    return getattr(transformers, CASES[case].hf_class)(**CASES[case].hf_config)


def hf_model(case: str, seed: int = 0) -> Any:
    """The tiny model of transformers in float32, every parameter and layer scalar random."""
    return hf_random(hf_config(case), seed)


def hf_random(config: Any, seed: int = 0) -> Any:
    """The model of ``config``, every parameter and layer scalar random."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, **EAGER).eval()
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
        directory, dtype=torch.float32, output_loading_info=True, **EAGER
    )
    assert not any(report.values()), report
    return model.eval()


def tunix_model(case: str, seed: int = 0) -> Any:
    """Tunix's tiny model in float32, every parameter random."""
    from flax import nnx

    model_class, config = tunix_class(case)
    # Shapes alone: Tunix's own random values would be compiled one by one, for seconds.
    model = nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))
    randomise_tunix(model, seed)
    return model


def tunix_class(case: str) -> tuple[Any, Any]:
    """Tunix's class of the tiny model, and its config."""
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma4 import model as gemma4

    family, layers, values = CASES[case].family, CASES[case].layers, CASES[case].tunix_config
    if family == "gemma3":  # its pattern is fixed
        return gemma3.Gemma3, gemma3.ModelConfig(**values, param_dtype=np.float32)
    module, key = (
        (gemma4, "attention_pattern") if family == "gemma4" else (gemma, "attention_types")
    )
    kind = {"L": module.AttentionType.LOCAL_SLIDING, "G": module.AttentionType.GLOBAL}
    config = module.ModelConfig(**values, **{key: tuple(kind[letter] for letter in layers)})
    return gemma4.Gemma4 if family == "gemma4" else gemma.Gemma, config


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
    """Tunix's float32 logits (tokens, v) of `IDS`, without a cache, with the later router."""
    import jax
    import jax.numpy as jnp

    count = len(IDS)
    causal = jnp.tril(jnp.ones((1, count, count), bool))
    with jax.default_matmul_precision("highest"), _router_mended():
        logits, _ = model(jnp.asarray([IDS]), jnp.arange(count)[None], None, causal)
    return np.asarray(logits[0])


@contextmanager
def _router_mended() -> Iterator[None]:
    """Tunix with the router of its later versions.

    Tunix 0.1.7 gives the router what the experts get, ``moe_pre_ffw_norm(x)``, where transformers,
    DeepMind's library and Tunix at git c7d8950 give it x; the weights are the same. Its choice of
    experts by ``approx_max_k`` need not be the exact one either.
    """
    import jax
    from tunix.models.gemma4 import model as gemma4
    from tunix.models.gemma4 import moe

    norm, route = gemma4.RMSNorm.__call__, moe.MoERagged.__call__
    run, choose = moe.MoERagged._run_ffw_and_routing, jax.lax.approx_max_k
    seen: dict[str, Any] = {}

    def remember(module: Any, x: Any) -> Any:  # the last norm before the experts is theirs
        seen["before"] = x
        return norm(module, x)

    def route_unscaled(module: Any, x: Any) -> Any:
        seen["for experts"] = x
        return route(module, seen["before"])

    def run_scaled(module: Any, x: Any, choices: Any, weights: Any) -> Any:
        return run(module, seen["for experts"], choices, weights)

    gemma4.RMSNorm.__call__ = remember
    moe.MoERagged.__call__, moe.MoERagged._run_ffw_and_routing = route_unscaled, run_scaled
    jax.lax.approx_max_k = jax.lax.top_k
    try:
        yield
    finally:
        gemma4.RMSNorm.__call__ = norm
        moe.MoERagged.__call__, moe.MoERagged._run_ffw_and_routing = route, run
        jax.lax.approx_max_k = choose


def tunix_arrays(model: Any) -> dict[str, Array]:
    """Every parameter of Tunix's ``model`` by its dotted path."""
    from flax import nnx

    return {
        ".".join(map(str, path)): np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    }


def tunix_set(model: Any, arrays: Mapping[str, Array]) -> None:
    """Give some parameters of Tunix's ``model``, by their dotted paths, other values."""
    import jax.numpy as jnp
    from flax import nnx

    state = nnx.state(model)
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    for name, array in arrays.items():
        assert array.shape == leaves[name].shape
        leaves[name].set_value(jnp.asarray(array))
    nnx.update(model, state)


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
