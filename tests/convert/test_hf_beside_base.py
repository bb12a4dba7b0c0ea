"""A Hugging Face source beside a Hugging Face base: tensors of one name, told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.joined_config import joined_config
from gemma_convert.convert.layouts import HF, LAYOUTS, TUNIX, Layout
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.readers.side_files import files_of_both
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


@pytest.mark.parametrize("shared", [(2,), (1, 2)])
def test_a_stacked_array_of_which_nothing_is_read_is_dropped(shared: tuple[int, ...]) -> None:
    text = {**GEMMA4["text_config"], "attention_k_eq_v": False}
    config = {**text, "num_kv_shared_layers": len(shared)}
    dead = [f"layers.{i}.self_attn.{n}." for i in shared for n in ("k_proj", "v_proj", "k_norm")]
    tuned = memory(base_arrays(config, PREFIX, seed=5), config=config)
    alive = {n: a for n, a in arrays(tuned).items() if not any(part in n for part in dead)}
    stacked = convert(tuned, LAYOUTS["deepmind-stacked"]).plan.target
    plan = convert(stacked, HF, base=memory(alive, config=config, source="base")).plan
    assert_same_bits(arrays(plan.target), alive)
    assert {name for name, why in plan.dropped.items() if why != OWN} == {
        f"transformer/stacked_layers/attention_type_{i}/attn/{name}"
        for i in shared
        for name in ("kv_einsum/w", "key_norm/scale")
    }


@pytest.mark.parametrize(
    "key", ["query_pre_attn_scalar", "sliding_window", "rope_theta", "layer_types"]
)
@pytest.mark.parametrize("said_by", ["both", "tuned", "base"])
def test_the_text_model_is_what_the_weights_were_trained_as(key: str, said_by: str) -> None:
    """Whatever the base's config.json says, or does not say, of the same shapes."""
    own = {"layer_types": ["full_attention"] * GEMMA3["num_hidden_layers"]}.get(key, 6)
    other = {"layer_types": ["sliding_attention"] * GEMMA3["num_hidden_layers"]}.get(key, 8)
    tuned = checkpoint(weights(5), "tuned", **({key: own} if said_by != "base" else {}))
    base = checkpoint(weights(6), "base", **({key: other} if said_by != "tuned" else {}))
    config = convert(tuned, HF, base=base).plan.target.config
    assert config == tuned.config


NESTED = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "mm_tokens_per_image": 4,
    "vision_config": {"model_type": "siglip_vision_model", "layer_norm_eps": 1e-6},
    "text_config": {**GEMMA3, "sliding_window": 8},
}


def test_a_text_model_in_a_bases_whole_one() -> None:
    """The towers and what goes with them are the base's; the text model and its head are not."""
    own = {**GEMMA3, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 6}
    joined = joined_config(own, NESTED, {"vision"})
    del own["architectures"]
    expected = {**NESTED, "text_config": own, "tie_word_embeddings": GEMMA3["tie_word_embeddings"]}
    assert joined == expected


@pytest.mark.parametrize("has_tower", [True, False])
@pytest.mark.parametrize("tied", [True, False, None])
def test_two_whole_models(has_tower: bool, tied: bool | None) -> None:
    """A tower's section is of whoever gives the tower; the rest is the source's, if it says it."""
    left = ("tie_word_embeddings", "architectures")
    text = {key: value for key, value in GEMMA3.items() if key not in left}
    own: dict[str, Any] = {
        "model_type": "gemma3",
        "image_token_index": 7,
        "vision_config": {"model_type": "siglip_vision_model", "layer_norm_eps": 0.5},
        "text_config": text,
    }
    if tied is not None:
        own["tie_word_embeddings"] = tied
    joined = joined_config(own, NESTED, set() if has_tower else {"vision"})
    assert joined["vision_config"] == (own if has_tower else NESTED)["vision_config"]
    assert joined["text_config"] == text
    assert joined.get("tie_word_embeddings") == tied
    assert (joined["image_token_index"], joined["mm_tokens_per_image"]) == (7, 4)


def test_a_whole_model_beside_a_bases_text_model() -> None:
    assert joined_config(NESTED, GEMMA3, {"vision"}) == NESTED


@pytest.mark.parametrize("has_tower", [True, False])
def test_a_tower_keeps_its_section(has_tower: bool, tmp_path: Path) -> None:
    """Also where the source's config.json describes a tower that it does not have."""
    tuned, base = (
        open_checkpoint(tiny_towers.save("gemma3", tmp_path / name, seed))
        for seed, name in enumerate(("tuned", "base"))
    )
    section = {**tuned.config["vision_config"], "layer_norm_eps": 0.5}
    tuned = tuned.replace(config={**tuned.config, "vision_config": section})
    if not has_tower:
        text = {name: tensor for name, tensor in tuned.items() if "language_model" in name}
        tuned = tuned.replace(tensors=text)
    target = convert(tuned, HF, base=base).plan.target
    eps = target.config["vision_config"]["layer_norm_eps"]
    assert (eps == 0.5) == has_tower
    assert set(target) == set(base)


def test_a_head_beside_a_base_without_weights() -> None:
    """As a directory of config and tokenizer."""
    values = weights(5)
    values[HEAD] = values[f"{PREFIX}embed_tokens.weight"] + np.float32(1)
    tuned = checkpoint(values, "tuned", tie_word_embeddings=False)
    base = checkpoint({}, "base", tie_word_embeddings=False)
    assert_same_bits(arrays(convert(tuned, HF, base=base).plan.target), arrays(tuned))


@pytest.mark.parametrize("layout", ["hf", "tunix", "deepmind-stacked", "maxtext"])
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_what_nothing_reads_gets_the_sources_dtype(layout: str, dtypes: tuple[str, str]) -> None:
    """A fine-tune in float32 beside the Hub's bfloat16: one array cannot hold both."""
    config = {**GEMMA4["text_config"], "attention_k_eq_v": False, "num_kv_shared_layers": 1}
    own, other = map(np.dtype, dtypes)
    tuned = base_arrays(config, PREFIX, own, seed=5)
    dead = [f"{PREFIX}layers.2.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    alive = {name: array for name, array in tuned.items() if name not in dead}
    base = memory(base_arrays(config, PREFIX, other, seed=6), config=config, source="base")
    job = convert(memory(alive, config=config, source="tuned"), LAYOUTS[layout], base=base)
    assert {tensor.dtype for tensor in job.plan.target.values()} == {own}


def test_a_head_of_the_base_is_no_head_of_the_source() -> None:
    values = weights(6)
    values[HEAD] = values[f"{PREFIX}embed_tokens.weight"] + np.float32(1)
    base = checkpoint(values, "base", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=f"^tuned: no {HEAD}, and config.json says"):
        convert(checkpoint(weights(5), "tuned", tie_word_embeddings=False), HF, base=base)


def test_side_files_of_the_source_come_first(tmp_path: Path) -> None:
    """As a tokenizer with more tokens: none of the base's goes in, and its processor does."""
    made = {}
    others = ["tokenizer.json", "chat_template.jinja", "added_tokens.json", "x.json"]
    for name, files in (("tuned", ["tokenizer.json"]), ("base", others)):
        for file in files:
            (tmp_path / f"{name}-{file}").write_text("{}")
        found = {file: tmp_path / f"{name}-{file}" for file in files}
        made[name] = checkpoint(weights(5), name).replace(files=found)
    files = convert(made["tuned"], HF, base=made["base"]).plan.target.files
    assert {name: path.name for name, path in files.items()} == {
        "tokenizer.json": "tuned-tokenizer.json",
        "x.json": "base-x.json",
    }


def test_a_template_alone_is_no_tokenizer(tmp_path: Path) -> None:
    """The base's tokenizer stays, the template is the source's."""
    files = {name: tmp_path / name for name in ("tokenizer.json", "chat_template.jinja")}
    own = {"chat_template.jinja": tmp_path / "own.jinja"}
    assert files_of_both(own, files) == {**files, **own}


@pytest.mark.parametrize("layout", ["tunix-head", "deepmind", "maxtext-unscanned"])
def test_towers_of_the_base_that_the_source_has_itself(layout: str, tmp_path: Path) -> None:
    tuned, base = (
        open_checkpoint(tiny_towers.save("gemma3", tmp_path / name, seed))
        for seed, name in enumerate(("tuned", "base"))
    )
    dropped = convert(tuned, LAYOUTS[layout], base=base).plan.dropped
    reasons = {why for name, why in dropped.items() if name.endswith(f" of {base.source}")}
    assert reasons == {OWN}


def test_a_base_of_another_family_is_refused() -> None:
    """Its towers would stand around a text model that they do not fit."""
    base = memory({}, config=GEMMA4, source="base")
    with pytest.raises(ConfigError, match="is not of gemma3, as tuned is"):
        convert(checkpoint(weights(5), "tuned"), HF, base=base)
