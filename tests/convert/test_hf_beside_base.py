"""A Hugging Face source beside a Hugging Face base: tensors of one name, told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, LAYOUTS, TUNIX, Layout
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.tensor import Array
from tests import tiny_towers
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


@pytest.mark.parametrize("layout", ["tunix", "deepmind", "deepmind-stacked"])
@pytest.mark.parametrize("whole", [True, False])
def test_what_nothing_reads_is_the_bases_or_zero(layout: str, whole: bool) -> None:
    """And is said to be what it is, also in one array with the layers that are read."""
    config = {**GEMMA4["text_config"], "attention_k_eq_v": False, "num_kv_shared_layers": 1}
    tuned, hub = (base_arrays(config, PREFIX, seed=seed) for seed in (5, 6))
    dead = [f"{PREFIX}layers.2.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    alive = {name: array for name, array in tuned.items() if name not in dead}
    base = {name: array for name, array in hub.items() if whole or name not in dead}
    checkpoints = (memory(values, config=config, source="x") for values in (alive, base))
    source, beside = checkpoints
    job = convert(source, LAYOUTS[layout], base=beside)
    back = arrays(convert(job.plan.target, HF, base=memory(hub, config=config)).plan.target)
    for name in dead:
        expected = hub[name] if whole else np.zeros_like(hub[name])
        assert np.array_equal(back[name], expected), name
    [note] = [note for note in job.plan.target.notes if "never reads" in note]
    assert ("taken from the base" if whole else "filled with zeros") in note
    assert ("taken from the base" in note) == whole


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"query_pre_attn_scalar": 3}, "query_pre_attn_scalar is 3, in base it is"),
        ({"rope_theta": 50.0}, "RoPE of full_attention is"),
        ({"rope_local_base_freq": 9.0}, "RoPE of sliding_attention is"),
        ({"sliding_window": 4}, "sliding_window is 4, in base it is"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, in base it is True"),
    ],
)
def test_another_model_of_the_same_shapes_is_refused(changed: dict[str, Any], told: str) -> None:
    """The output has one config.json, and that is the base's."""
    values = weights(5)
    if changed.get("tie_word_embeddings") is False:
        values[HEAD] = values[f"{PREFIX}embed_tokens.weight"] + np.float32(1)
    known = {"query_pre_attn_scalar": 10, "sliding_window": 8}
    tuned = checkpoint(values, "tuned", **{**known, **changed})
    base = checkpoint(weights(6), "base", **known)
    with pytest.raises(ConfigError, match=f"^tuned: config.json: {told}"):
        convert(tuned, HF, base=base)


def test_keys_that_change_nothing_may_differ() -> None:
    """And RoPE may be spelled in the old form and in the new one."""
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
    new = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    tuned = checkpoint(weights(5), "tuned", rope_parameters=new, pad_token_id=1, use_cache=False)
    base = checkpoint(weights(6), "base", **old, pad_token_id=0, use_cache=True)
    assert convert(tuned, HF, base=base).plan.target.config["pad_token_id"] == 0


def test_a_head_of_the_base_is_no_head_of_the_source() -> None:
    values = weights(6)
    values[HEAD] = values[f"{PREFIX}embed_tokens.weight"] + np.float32(1)
    base = checkpoint(values, "base", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=f"^tuned: no {HEAD}, and config.json says"):
        convert(checkpoint(weights(5), "tuned", tie_word_embeddings=False), HF, base=base)


def test_side_files_of_the_source_come_first(tmp_path: Path) -> None:
    """As a tokenizer with more tokens, and the base's processor beside it."""
    made = {}
    for name, files in (("tuned", ["tokenizer.json"]), ("base", ["tokenizer.json", "x.json"])):
        for file in files:
            (tmp_path / f"{name}-{file}").write_text("{}")
        found = {file: tmp_path / f"{name}-{file}" for file in files}
        made[name] = checkpoint(weights(5), name).replace(files=found)
    files = convert(made["tuned"], HF, base=made["base"]).plan.target.files
    assert {name: path.name for name, path in files.items()} == {
        "tokenizer.json": "tuned-tokenizer.json",
        "x.json": "base-x.json",
    }


@pytest.mark.parametrize("layout", ["tunix-head", "deepmind", "maxtext-unscanned"])
def test_towers_of_the_base_that_the_source_has_itself(layout: str, tmp_path: Path) -> None:
    tuned, base = (
        open_checkpoint(tiny_towers.save("gemma3", tmp_path / name, seed))
        for seed, name in enumerate(("tuned", "base"))
    )
    dropped = convert(tuned, LAYOUTS[layout], base=base).plan.dropped
    reasons = {why for name, why in dropped.items() if name.endswith(f" of {base.source}")}
    assert reasons == {OWN}
