"""DeepMind's own flax model on a checkpoint of ours: run by the Python that has ``gemma``.

    python deepmind_forward.py REQUEST.json...

Each request is answered by LOGITS.npy beside it, but for Gemma 4 where the library has none.

The library (PyPI ``gemma`` 3.3.0, without Gemma 4) wants an older jax than this project's tests,
so it has an environment of its own and this file imports nothing of the project. Its own
``load_params`` reads the checkpoint.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def answer(request: Path) -> None:
    """Write the float32 logits (tokens, v) that the library computes as ``request`` asks."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from gemma import gm

    asked = json.loads(request.read_text())
    package = "gemma.gm.nn.gemma4" if asked["family"] == "gemma4" else "gemma.gm.nn"
    if find_spec(package) is None:
        return
    transformer = import_module(f"{package}._transformer").Transformer
    model = transformer(config=_config(asked, package), dtype=jnp.float32)
    params = gm.ckpts.load_params(asked["checkpoint"])
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    with jax.default_matmul_precision("highest"):
        made = model.apply({"params": params}, jnp.asarray([asked["ids"]]))
    np.save(request.with_name("LOGITS.npy"), np.asarray(made.logits[0]))


def _config(asked: dict[str, Any], package: str) -> Any:
    config = import_module(f"{package}._config")
    attention = import_module(f"{package}._modules").AttentionType
    kinds = {"L": "LOCAL_SLIDING", "G": "GLOBAL"}
    values = dict(asked["config"])
    share = values.pop("frac_shared_layers", 0)
    if share:
        values["kv_cache_sharing_config"] = config.KVCacheSharingConfig(share, True, True)
    types = tuple(attention[kinds[letter]] for letter in asked["layers"])
    return config.TransformerConfig(**values, attention_types=types)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        answer(path)
