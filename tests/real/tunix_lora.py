"""A LoRA trained on the real Gemma 3 270M by Tunix itself, and Tunix's own logits of it.

``python -m tests.real.tunix_lora DIR`` (from the repository's root) trains into ``DIR/<step>``;
without DIR it prints the cached checkpoint.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.real.gemma_270m import build_once, content_key, hf_directory

RANK = 8
ALPHA = 16.0
STEPS = 6
LEARNING_RATE = 2e-3
MODULES = ".*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"
# Pairs of factors: six modules in each of the 18 layers.
PAIRS = 6 * 18
SENTENCES = (
    "The lighthouse keeper wrote every evening in a blue notebook: wind from the north-west, two "
    "ships seen, lamp trimmed at six. On Sundays he added the weight of the fish he had caught.",
    "To bake the island's bread, mix rye flour, warm water, salt and a spoon of honey; let it rest "
    "for three hours under a cloth, then bake it on a hot stone until the crust sings.",
)


def checkpoint_root() -> Path:
    """The cached directory of checkpoints: ``<root>/<STEPS>`` holds the trained factors."""
    from tests.real import gemma_270m

    name = f"tunix-lora-{content_key(__file__, gemma_270m.__file__)}"
    return build_once(name, lambda root: train(hf_directory(), root))


def checkpoint() -> Path:
    """The cached step directory, as given to ``gemma-convert orbax-to-hf``."""
    return checkpoint_root() / str(STEPS)


def base_model(hf_dir: Path) -> Any:
    """Tunix's Gemma 3 270M with the directory's weights in float32, by Tunix's own loader."""
    import jax.numpy as jnp
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma3 import params_safetensors

    config = gemma3.ModelConfig.gemma3_270m()
    return params_safetensors.create_model_from_safe_tensors(
        str(hf_dir), config, dtype=jnp.float32, mode="optimized"
    )


def lora_model(hf_dir: Path) -> Any:
    """The base model with fresh LoRA factors (B = 0) in float32."""
    import qwix
    from flax import nnx

    base = base_model(hf_dir)
    provider = qwix.LoraProvider(module_path=MODULES, rank=RANK, alpha=ALPHA)
    inputs = base.get_model_input()
    return qwix.apply_lora_to_model(base, provider, **inputs, rngs=nnx.Rngs(0))


def train(hf_dir: Path, root: Path) -> None:
    """Train a few steps with Tunix's PeftTrainer, which writes ``root/<STEPS>``."""
    import optax
    import orbax.checkpoint as ocp
    from tunix.sft import peft_trainer

    model = lora_model(hf_dir)
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=STEPS,
        max_steps=STEPS,
        checkpoint_root_directory=str(root),
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=STEPS),
        pbar_description=None,
    )
    trainer = peft_trainer.PeftTrainer(model, optax.adam(LEARNING_RATE), config)
    trainer.with_gen_model_input_fn(_model_input).train(_batches(hf_dir))
    for path, factor in factors(model).items():
        if path.endswith("_lora_b") and not np.all(np.any(factor != 0, axis=-1)):
            raise ValueError(f"{path} was not trained")


def _batches(hf_dir: Path) -> Iterator[Any]:
    from transformers import AutoTokenizer
    from tunix.sft import peft_trainer

    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    for step in range(STEPS):
        ids = tokenizer(SENTENCES[step % len(SENTENCES)], padding="max_length", max_length=64)
        tokens = np.asarray([ids["input_ids"]])
        yield peft_trainer.TrainingInput(tokens, np.asarray([ids["attention_mask"]], bool))


def _model_input(batch: Any) -> dict[str, Any]:
    """Positions and mask as Tunix's own examples build them."""
    from tunix.sft import utils

    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(batch.input_mask),
        "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
    }


def factors(model: Any) -> dict[str, npt.NDArray[np.float32]]:
    """The LoRA factors by their dotted path, such as ``layers.0.attn.q_einsum.w_lora_a``."""
    from flax import nnx

    flat = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def restored_model(hf_dir: Path, orbax_dir: Path) -> Any:
    """Base and trained factors, restored by Tunix's own CheckpointManager from a step directory."""
    from tunix.sft import checkpoint_manager

    model = lora_model(hf_dir)
    manager = checkpoint_manager.CheckpointManager(str(orbax_dir.parent))
    step, _ = manager.maybe_restore(model, step=int(orbax_dir.name), restore_only_lora_params=True)
    manager.close()
    if step != int(orbax_dir.name):
        raise ValueError(f"Tunix restored step {step} of {orbax_dir}")
    return model


def logits(model: Any, token_ids: list[int]) -> npt.NDArray[np.float32]:
    """Tunix's float32 logits ``(tokens, vocabulary)``, any length, without a KV cache."""
    import jax

    # Padding on the right (masked, and behind every real token) lets lengths share a compilation.
    padding = -len(token_ids) % 64
    tokens = np.pad(np.asarray([token_ids]), ((0, 0), (0, padding)))
    mask = np.arange(tokens.shape[1])[None] < len(token_ids)
    with jax.default_matmul_precision("highest"):
        output = _forward()(model, tokens, mask)
    return np.asarray(output[0, : len(token_ids)], np.float32)


@functools.cache
def _forward() -> Any:
    """The compiled forward pass, with positions and mask as Tunix's trainer builds them."""
    from flax import nnx
    from tunix.sft import utils

    def forward(model: Any, tokens: Any, mask: Any) -> Any:
        positions = utils.build_positions_from_mask(mask)
        return model(tokens, positions, None, utils.make_causal_attn_mask(mask))[0]

    return nnx.jit(forward)


def tunix_logits(hf_dir: Path, orbax_dir: Path, token_ids: list[int]) -> npt.NDArray[np.float32]:
    """Tunix's float32 logits ``(tokens, vocabulary)`` of base + trained factors."""
    return logits(restored_model(hf_dir, orbax_dir), token_ids)


def greedy(model: Any, token_ids: list[int], count: int) -> list[int]:
    """The next ``count`` tokens by argmax, each from a forward pass over everything before it."""
    ids = list(token_ids)
    for _ in range(count):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[len(token_ids) :]


def main() -> None:
    """Print the cached step directory, or train into DIR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR")
    directory = parser.parse_args().directory
    if directory is None:
        print(checkpoint())
    else:
        train(hf_directory(), directory.absolute())
        print(directory / str(STEPS))


if __name__ == "__main__":
    main()
