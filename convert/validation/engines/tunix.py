"""Tunix's models as an engine: any checkpoint that Tunix's layout holds, factors not merged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError, LayoutError
from gemma_convert.convert.job import Job
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import TUNIX
from gemma_convert.convert.parts import take_apart
from gemma_convert.convert.validation.engines.base import About, Logits
from gemma_convert.convert.validation.engines.packages import require_packages
from gemma_convert.convert.validation.engines.tunix_config import tunix_class
from gemma_convert.convert.vocabulary import vocabulary
from gemma_convert.surgery.adapters.adapter import Adapter
from gemma_convert.surgery.adapters.qwix import read_qwix, split_factors

_LENGTH_STEP = 64
"""Prompts are padded to a multiple of this, so that few lengths are compiled."""


@dataclass(frozen=True)
class Tunix:
    """Weights, and LoRA factors if there are any, for Tunix's model.

    Attributes:
        about: What a report says of it.
        source: The checkpoint; factors in it are applied by Qwix, not merged.
        base: HF directory that gives the config, and the weights where ``source`` has none.
        alpha: LoRA alpha, where the source's metadata does not say it.
    """

    about: About
    source: Checkpoint
    base: Checkpoint
    alpha: float | None

    def require_runnable(self) -> None:
        """See `Source.require_runnable`."""
        require_packages("Tunix's model", ("jax", "flax", "tunix", "qwix", "transformers"), "train")
        job = self._job()
        assert job.model is not None
        tunix_class(self.base.config, job.model.family.name, vocabulary(job.model, TUNIX))

    def load(self) -> Loaded:
        """Build Tunix's model and give it the weights, in float32.

        Raises:
            GemmaConvertError: If config, weights and factors do not fit together.
        """
        pairs = split_factors(self.source)[1]
        job = self._job()
        assert job.model is not None
        rows = vocabulary(job.model, TUNIX)
        text = take_apart(job.plan.target, job.model, TUNIX).text
        model = _model(self.base.config, job.model.family.name, rows, text)
        if pairs:
            adapter = read_qwix(pairs, self.source.metadata, self.alpha, self.source.source)
            model = _with_factors(model, adapter)
        return Loaded(self.about, model)

    def _job(self) -> Job:
        """The weights in Tunix's layout; nothing is read."""
        own = split_factors(self.source)[0]
        if not own:
            return convert(self.base, TUNIX)
        is_base = own.source == self.base.source
        configured = Checkpoint({}, config=self.base.config, source=self.base.source)
        return convert(own, TUNIX, base=None if is_base else configured)


def _model(config: Mapping[str, Any], family: str, rows: int, weights: Checkpoint) -> Any:
    """Tunix's model with ``weights``, each read once."""
    import jax.numpy as jnp
    from flax import nnx

    model_class, model_config = tunix_class(config, family, rows)
    # Shapes alone: Tunix's own random values would be compiled one by one.
    model = nnx.eval_shape(lambda: model_class(model_config, rngs=nnx.Rngs(0)))
    state = nnx.state(model)
    left = dict(weights)
    for path, leaf in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        tensor = left.pop(name, None)
        if tensor is None or tensor.size != np.prod(leaf.shape, dtype=int):
            found = "nothing" if tensor is None else list(tensor.shape)
            raise LayoutError(
                f"{weights.source}: {name}: Tunix's model has {list(leaf.shape)}, found {found}",
                "config.json and tensors belong to different models",
            )
        leaf.set_value(jnp.asarray(tensor.numpy().astype(np.float32).reshape(leaf.shape)))
    if left:
        raise LayoutError(
            f"{weights.source}: {next(iter(left))}: Tunix's model has no such parameter",
            "config.json and tensors belong to different models",
        )
    nnx.update(model, state)
    return model


def _with_factors(model: Any, adapter: Adapter) -> Any:
    """``model`` with the factors applied by Qwix to exactly the modules that have some."""
    import jax.numpy as jnp
    import qwix
    from flax import nnx

    paths: dict[tuple[int, float], list[str]] = {}
    for name, pair in adapter.pairs.items():
        # layers.0.attn.q_einsum.w is a weight of the module layers/0/attn/q_einsum
        module = re.escape(name.rpartition(".")[0].replace(".", "/"))
        paths.setdefault((pair.rank, adapter.scale(name)), []).append(module)
    rules = [
        qwix.LoraRule(module_path="|".join(found), rank=rank, alpha=rank * scale)
        for (rank, scale), found in paths.items()
    ]
    inputs = model.get_model_input()
    adapted = qwix.apply_lora_to_model(model, qwix.LoraProvider(rules), **inputs, rngs=nnx.Rngs(0))
    state = nnx.state(adapted, nnx.LoRAParam)
    left = {
        f"{name}_lora_{side}": factor
        for name, pair in adapter.pairs.items()
        for side, factor in pair.factors().items()
    }
    for path, leaf in nnx.to_flat_state(state):
        tensor = left.pop(".".join(map(str, path)), None)
        if tensor is None or tensor.shape != leaf.shape:
            raise AdapterError(
                f"{'.'.join(map(str, path))}: Qwix makes a factor {list(leaf.shape)}, "
                f"found {'nothing' if tensor is None else list(tensor.shape)}",
                "the factors belong to another model",
            )
        leaf.set_value(jnp.asarray(tensor.numpy().astype(np.float32)))
    if left:
        raise AdapterError(
            f"{next(iter(left))}: Qwix adds no factor there", "the factors belong to another model"
        )
    nnx.update(adapted, state)
    return adapted


class Loaded:
    """A model of Tunix in memory, in float32."""

    def __init__(self, about: About, model: Any) -> None:
        self.about = about
        self._model = model

    def run(self, ids: list[int], keep: list[int], *, layers: bool) -> Logits:
        """See `Engine.run`."""
        import jax

        padding = -len(ids) % _LENGTH_STEP
        tokens = np.pad(np.asarray([ids]), ((0, 0), (0, padding)))
        # So many positions for every prompt of this padded length; the surplus is cut off.
        places = np.pad(np.asarray(keep), (0, -len(keep) % _LENGTH_STEP))
        with jax.default_matmul_precision("highest"):
            logits, hidden = _forward(self._model, tokens, len(ids), places, layers)
        found = np.asarray(logits[0, : len(keep)], np.float32)
        states = np.stack([np.asarray(h[0], np.float32) for h in hidden]) if layers else None
        return Logits(found, None if states is None else states[:, : len(keep)])


def _forward(model: Any, tokens: Any, length: int, keep: Any, layers: bool) -> Any:
    """Logits (1, kept, v) and, if wanted, what passes between the layers at these positions."""
    from flax import nnx

    def forward(model: Any, tokens: Any, length: Any, keep: Any) -> Any:
        import jax.numpy as jnp

        count = tokens.shape[1]
        real = jnp.arange(count) < length
        mask = jnp.tril(jnp.ones((count, count), bool)) & real[None]
        with _watched(model, keep) as states:
            logits, _ = model(tokens, jnp.arange(count)[None], None, mask[None])
        return logits, states if layers else []

    return nnx.jit(forward)(model, tokens, length, keep)


@contextmanager
def _watched(model: Any, keep: Any) -> Iterator[list[Any]]:
    """Collect the hidden states at ``keep``, and decode no other positions.

    Logits of all positions of a long prompt would be gigabytes.
    """
    layer_class, embedder_class = type(model.layers[0]), type(model.embedder)
    call, decode = layer_class.__call__, embedder_class.decode
    states: list[Any] = []

    def watched(layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        output = call(layer, x, *args, **kwargs)
        if not states:
            states.append(x[:, keep])
        states.append(output[1][:, keep])
        return output

    layer_class.__call__ = watched
    embedder_class.decode = lambda embedder, x: decode(embedder, x[:, keep])
    try:
        yield states
    finally:
        layer_class.__call__, embedder_class.decode = call, decode
