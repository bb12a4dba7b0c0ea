"""A Hugging Face source beside a Hugging Face base: tensors of one name, told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, TUNIX, Layout
from gemma_convert.convert.tensor import Array
from tests.checkpoints import GEMMA3, GEMMA4, arrays, assert_same_bits, base_arrays, memory

PREFIX = "model."
HEAD = "lm_head.weight"
OWN = "of the base: the checkpoint has its own weights"


def weights(seed: int) -> dict[str, Array]:
    return base_arrays(GEMMA3, PREFIX, seed=seed)


def checkpoint(values: dict[str, Array], source: str, **config: Any) -> Checkpoint:
    return memory(values, config={**GEMMA3, **config}, source=source)


@pytest.mark.parametrize("layout", [HF, TUNIX], ids=lambda layout: layout.name)
def test_the_source_counts_and_the_base_is_left_out(layout: Layout) -> None:
    """All names are in both; every one of the base's has its reason."""
    tuned, base = checkpoint(weights(5), "tuned"), checkpoint(weights(6), "base")
    job = convert(tuned, layout, base=base)
    assert_same_bits(arrays(job.plan.target), arrays(convert(tuned, layout).plan.target))
    assert job.plan.dropped == {f"{name} of base": OWN for name in base}
    assert job.plan.counts["dropped"] == len(base)


def test_tied_heads_of_both_are_left_out() -> None:
    """Each repeats its own embedding."""
    both = [
        checkpoint({**values, HEAD: values[f"{PREFIX}embed_tokens.weight"]}, name)
        for values, name in ((weights(5), "tuned"), (weights(6), "base"))
    ]
    job = convert(both[0], HF, base=both[1])
    assert HEAD not in job.plan.target
    reason = "tied to the embedding: written once"
    assert job.plan.dropped[f"{HEAD} of tuned"] == job.plan.dropped[f"{HEAD} of base"] == reason


def test_an_untied_head_is_the_sources() -> None:
    """A head beside the text model goes with the text model, not with the base."""
    found = []
    for seed, name in ((5, "tuned"), (6, "base")):
        values = weights(seed)
        values[HEAD] = values[f"{PREFIX}embed_tokens.weight"] + np.float32(seed)
        found.append(checkpoint(values, name, tie_word_embeddings=False))
    job = convert(found[0], HF, base=found[1])
    assert_same_bits(arrays(job.plan.target), arrays(found[0]))
    assert job.plan.dropped[f"{HEAD} of base"] == OWN


def test_a_tower_of_the_base_beside_a_text_model_of_the_same_names() -> None:
    """A fine-tune that dropped the tower gets it back from the base."""
    nested = {"model_type": "gemma3", "text_config": GEMMA3, "tie_word_embeddings": True}
    prefix, tower = "model.language_model.", "model.vision_tower.w"
    text, other = base_arrays(GEMMA3, prefix, seed=5), base_arrays(GEMMA3, prefix, seed=6)
    extra = {tower: np.arange(6, dtype=np.float32).reshape(2, 3)}
    base = memory({**other, **extra}, config=nested, source="base")
    job = convert(memory(text, config=nested, source="tuned"), HF, base=base)
    assert_same_bits(arrays(job.plan.target), {**text, **extra})


def test_what_transformers_dropped_in_saving_comes_back_from_the_base() -> None:
    """Keys and values of a layer that shares them: the Hub has them, a save by transformers not."""
    config = {**GEMMA4["text_config"], "attention_k_eq_v": False, "num_kv_shared_layers": 1}
    tuned, hub = (base_arrays(config, PREFIX, seed=seed) for seed in (5, 6))
    dead = [f"{PREFIX}layers.2.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    alive = {name: array for name, array in tuned.items() if name not in dead}
    base = memory(hub, config=config, source="base")
    job = convert(memory(alive, config=config, source="tuned"), HF, base=base)
    assert_same_bits(arrays(job.plan.target), {**alive, **{name: hub[name] for name in dead}})
    assert len(job.plan.dropped) == len(alive)
