"""Class, model_type, nesting and prefix of a Hugging Face output go together (F20)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError
from gemma_convert.convert.hf_form import respelled
from gemma_convert.convert.job import Job
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, TUNIX
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.writers.hf import write_hf
from tests.checkpoints import (
    ALPHA,
    FORMS,
    GEMMA3,
    GEMMA4,
    NESTED,
    PREFIXES,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    memory,
    read_hf,
    run_cli,
    write_base,
)
from tests.tiny import EAGER, hf_loaded, hf_logits, hf_model, hf_weights
from tests.tiny_cases import CASES

LIKE = {
    "gemma1-mqa": "gemma-2b",
    "gemma1-mha": "gemma-7b",
    "gemma2": "gemma-2-2b",
    "gemma3": "gemma-3-1b",
    "gemma3-mha": "gemma-3-270m",
    "gemma4": "gemma-4-31b",
    "gemma4-12b": "gemma-4-12b",
    "gemma4-moe": "gemma-4-26b-a4b",
    "gemma4-e2b": "gemma-4-e2b",
    "gemma4-e4b": "gemma-4-e4b",
}
"""Public models of the architectures of the tiny ones."""
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
NO_BASE = (
    "config.json is made from what is known of tiny; tokenizer, chat template and generation "
    "settings are not: give a directory that has them with --base"
)


@pytest.fixture
def shrunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A case with the public model ``tiny``: what is known of the real one, in the case's sizes."""
    case: str = request.param
    shrink(monkeypatch, case, LIKE[case])
    return case


def shrink(monkeypatch: pytest.MonkeyPatch, case: str, like: str) -> None:
    """Know a public model ``tiny``: ``like`` in the sizes of ``case``."""
    family = families()[CASES[case].family]
    preset = family.presets[like]
    wrapper = {**preset.wrapper, "vision_config": VISION} if preset.wrapper else {}
    tiny = replace(preset, sizes=CASES[case].hf_config, wrapper=wrapper)
    for table, entry in ((family.presets, tiny), (family.models, tiny.sizes)):
        assert isinstance(table, dict)
        monkeypatch.setitem(table, "tiny", entry)


def weights(model: Any) -> dict[str, Array]:
    """What transformers stores of ``model``, the tied head once."""
    return {name: weight.detach().numpy() for name, weight in hf_weights(model)}


def written(job: Job, directory: Path) -> Path:
    """The job's output on the disk."""
    directory.mkdir()
    write_hf(job.plan.target, directory, max_shard_bytes=10**9, progress=lambda *_: None)
    return directory


def config_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


# Without a base


@pytest.mark.parametrize("shrunk", LIKE, indirect=True)
def test_transformers_loads_what_is_made_without_a_base(shrunk: str, tmp_path: Path) -> None:
    """The same numbers in the same code: logits are equal bit for bit."""
    model = hf_model(shrunk)
    source = memory(weights(model), config=model.config.to_dict(), source="hf")
    tree = convert(source, TUNIX).plan.target.replace(config={}, files={}, source="tree")
    job = convert(tree, HF, model="tiny")
    assert job.plan.target.notes[-1] == NO_BASE
    out = written(job, tmp_path / "out")
    loaded = hf_loaded(out)
    assert config_of(out)["architectures"] == [type(loaded).__name__] == [type(model).__name__]
    np.testing.assert_array_equal(hf_logits(loaded), hf_logits(model))


@pytest.mark.parametrize("in_memory", [False, True])
def test_weights_with_towers_get_the_class_that_has_them(
    in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights under either spelling of the multimodal class, without a config.json."""
    import torch
    import transformers

    shrink(monkeypatch, "gemma3", "gemma-3-4b")
    linear = {"rope_type": "linear", "factor": 8.0}  # as the 4b has it
    text = transformers.Gemma3TextConfig(
        **CASES["gemma3"].hf_config, rope_parameters={"full_attention": linear}
    )
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    there = weights(model)
    if not in_memory:  # as the Hub has them
        there = {
            name.removeprefix("model.").replace("language_model.", "language_model.model."): array
            for name, array in there.items()
        }
    job = convert(memory(there, source="weights"), HF, model="tiny")
    out = written(job, tmp_path / "out")
    found = config_of(out)
    assert found["model_type"] == "gemma3"
    assert found["architectures"] == ["Gemma3ForConditionalGeneration"]
    prefixes = {"language_model", "vision_tower", "multi_modal_projector"}
    assert {name.split(".")[0] for name in read_hf(out)} == prefixes
    np.testing.assert_array_equal(hf_logits(hf_loaded(out)), hf_logits(model))


@pytest.mark.parametrize("shrunk", ["gemma3"], indirect=True)
def test_a_text_model_has_no_towers(shrunk: str) -> None:
    values = base_arrays(CASES[shrunk].hf_config | {"model_type": "gemma3_text"}, "model.")
    source = memory(values | {"vision_tower.w": np.ones((3, 2), np.float32)}, source="weights")
    with pytest.raises(ConfigError) as caught:
        convert(source, HF, model="tiny")
    assert str(caught.value) == (
        "weights: vision_tower.w is there, but tiny is a text model; name another one with --model"
    )


@pytest.mark.parametrize("shrunk", ["gemma3"], indirect=True)
def test_the_command_says_that_there_is_no_tokenizer(
    shrunk: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = hf_model(shrunk)
    base = write_base(tmp_path / "hf", model.config.to_dict(), weights(model))
    assert run_cli("convert", base, "--to", "tunix", "--out", tmp_path / "tunix") == 0
    words = ["convert", tmp_path / "tunix", "--to", "hf", "--model", "tiny"]
    capsys.readouterr()
    assert run_cli(*words, "--out", tmp_path / "out") == 0
    printed = capsys.readouterr()
    assert f"note: {NO_BASE}" in printed.err
    assert_same_bits(read_hf(tmp_path / "out"), weights(model))
    assert config_of(tmp_path / "out")["torch_dtype"] == "float32"


# With a base


def base(config: dict[str, Any], prefix: str, **more: Array) -> Checkpoint:
    """A base whose names begin with ``prefix``, and other tensors."""
    values = base_arrays(config, prefix) | {n.replace("__", "."): a for n, a in more.items()}
    return memory(values, config=config, source="base")


def tree(config: dict[str, Any]) -> Checkpoint:
    """LoRA factors for ``config``'s model."""
    return memory(factor_arrays(config), source="run", format="orbax")


@pytest.mark.parametrize(("config", "prefix"), FORMS)
def test_a_base_that_agrees_with_itself_is_copied(config: dict[str, Any], prefix: str) -> None:
    ours = base(config, prefix)
    job = convert(ours, HF)
    assert (dict(job.plan.target.config), job.plan.target.notes) == (config, ())
    assert list(job.plan.target) == list(ours)


WRONG = [
    (config, prefix, right)
    for config, right in (
        (GEMMA3, "model."),
        (NESTED, "language_model.model."),
        (GEMMA4, "model.language_model."),
        (GEMMA4["text_config"], "model."),
    )
    for prefix in PREFIXES
    if not any(config is ok and prefix == name for ok, name in FORMS)
]


@pytest.mark.parametrize(("config", "prefix", "right"), WRONG)
@pytest.mark.parametrize("lora", [False, True])
def test_names_follow_the_nesting_of_the_config(
    config: dict[str, Any], prefix: str, right: str, lora: bool
) -> None:
    """Each of these mixtures loads as random weights in transformers 5.12.1."""
    ours = base(config, prefix)
    job = convert(tree(config), HF, base=ours, alpha=ALPHA) if lora else convert(ours, HF)
    fitting = base(config, right)
    expected = (
        convert(tree(config), HF, base=fitting, alpha=ALPHA) if lora else convert(fitting, HF)
    )
    assert_same_bits(arrays(job.plan.target), arrays(expected.plan.target))
    note = f"names begin with {right} instead of {prefix}, as config.json asks for"
    assert job.plan.target.notes == (note,)
    assert job.plan.target.config == config


@pytest.mark.parametrize(
    ("config", "right", "notes"),
    [
        (
            {**GEMMA3, "architectures": ["Gemma3ForConditionalGeneration"]},
            {**GEMMA3, "architectures": ["Gemma3ForCausalLM"]},
            ("architectures is Gemma3ForCausalLM instead of Gemma3ForConditionalGeneration",),
        ),
        (
            {**GEMMA3, "model_type": "gemma3"},
            GEMMA3,
            ("model_type is gemma3_text instead of gemma3",),
        ),
        (
            {**GEMMA4, "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]},
            GEMMA4,
            (
                "model_type is gemma4 instead of gemma4_text",
                "architectures is Gemma4ForConditionalGeneration instead of Gemma4ForCausalLM",
            ),
        ),
    ],
)
def test_class_and_type_follow_the_nesting(
    config: dict[str, Any], right: dict[str, Any], notes: tuple[str, ...]
) -> None:
    how = "nested" if "text_config" in config else "at the top level"
    prefix = "model.language_model." if "text_config" in config else "model."
    target = convert(base(config, prefix), HF).plan.target
    assert target.config == right
    assert list(target.config) == list(config)
    assert target.notes == tuple(
        f"config.json: {note}, as the text model stands {how}" for note in notes
    )


def test_a_head_of_its_own_follows_the_names() -> None:
    """The wrapper of Gemma 3 has it under another name than the text model."""
    values = base_arrays(GEMMA3, "language_model.model.")
    head = values["language_model.model.embed_tokens.weight"] + 1
    flat = {**GEMMA3, "tie_word_embeddings": False}
    source = memory({**values, "language_model.lm_head.weight": head}, config=flat, source="base")
    target = convert(source, HF).plan.target
    assert target["lm_head.weight"] is source["language_model.lm_head.weight"]
    nested = {**NESTED, "tie_word_embeddings": False}
    values = base_arrays(GEMMA3, "model.")
    source = memory({**values, "lm_head.weight": head}, config=nested, source="base")
    target = convert(source, HF).plan.target
    assert target["language_model.lm_head.weight"] is source["lm_head.weight"]


def test_towers_follow_the_names() -> None:
    """Of Gemma 4, whose names on the Hub all begin with ``model.``."""
    config = {**GEMMA4, "vision_config": {"hidden_size": 6}}
    tower = {"vision_tower__encoder__w": np.ones((3, 2), np.float32)}
    ours = base(config, "language_model.model.", **tower)
    target = convert(ours, HF).plan.target
    assert target["model.vision_tower.encoder.w"] is ours["vision_tower.encoder.w"]
    assert respelled("model.vision_tower.w", "model.language_model.", "language_model.model.") == (
        "vision_tower.w"
    )


def test_towers_beside_the_config_of_a_text_model_are_refused() -> None:
    ours = base(GEMMA3, "language_model.model.", vision_tower__w=np.ones((3, 2), np.float32))
    with pytest.raises(ConfigError) as caught:
        convert(ours, HF)
    assert str(caught.value) == (
        "base: config.json is that of a text model (gemma3_text), but vision_tower.w is there; "
        "give the config.json of the whole model, or leave such tensors out"
    )


def test_what_is_not_known_is_left_as_it_is() -> None:
    """A class of the user's own, and a wrapper of another kind around a text model."""
    own = {**GEMMA3, "architectures": ["Gemma3ForSequenceClassification"]}
    assert convert(base(own, "model."), HF).plan.target.config == own
    wrapped = {"model_type": "paligemma", "text_config": {**GEMMA3, "model_type": "gemma2"}}
    target = convert(base(wrapped, "language_model.model."), HF).plan.target
    assert target.config == wrapped
    assert "language_model.model.norm.weight" in target
