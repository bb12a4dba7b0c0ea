"""Any layout to any other, with and without a base, with and without LoRA; the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError, ConfigError, InputError, LayoutError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import DEEPMIND, HF, TUNIX
from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.writers.orbax import write_orbax
from gemma_convert.convert.writers.orbax_tree import FORMS
from tests import lora_oracle
from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    GEMMA4,
    arrays,
    assert_same_bits,
    base_arrays,
    factor_arrays,
    memory,
    read_hf,
    run_cli,
    write_base,
    write_run,
)
from tests.layout_law import by_law

PREFIX = "model."
TINY = {key: value for key, value in GEMMA3.items() if isinstance(value, int | list)}
MHA = {**GEMMA3, "num_key_value_heads": 6}


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> str:
    """A public model of tests' size."""
    monkeypatch.setitem(dict_of(families()["gemma3"].models), "gemma-3-tiny", TINY)
    return "gemma-3-tiny"


def dict_of(mapping: Any) -> dict[str, Any]:
    """The table itself, to be patched."""
    assert isinstance(mapping, dict)
    return mapping


def hf(config: dict[str, Any] = GEMMA3) -> Checkpoint:
    """A base."""
    return memory(base_arrays(config, PREFIX), config=config, source="base")


def lawful(layout: str, config: dict[str, Any] = GEMMA3, lead: str = "") -> dict[str, Array]:
    """`hf` in a JAX layout, by the law."""
    made = by_law(base_arrays(config, PREFIX), PREFIX, config, layout)
    return {lead + name: array for name, array in made.items()}


def run(values: dict[str, Array], **fields: Any) -> Checkpoint:
    """A tree without config."""
    return memory(values, source="run", format="orbax", **fields)


def test_between_jax_layouts_by_the_name_of_a_model(tiny_model: str) -> None:
    job = convert(run(lawful("tunix")), DEEPMIND, model=tiny_model)
    assert_same_bits(arrays(job.plan.target), lawful("deepmind", lead="transformer/"))
    assert job.model.name == tiny_model
    assert [source.source for source in job.plan.sources] == ["run"]
    back = convert(run(arrays(job.plan.target)), TUNIX, model=tiny_model)
    assert_same_bits(arrays(back.plan.target), lawful("tunix"))


def test_between_jax_layouts_by_a_base() -> None:
    """Its config is used, its weights are not."""
    job = convert(run(lawful("tunix")), DEEPMIND, base=hf())
    assert_same_bits(arrays(job.plan.target), lawful("deepmind", lead="transformer/"))
    assert dict(job.plan.dropped) == dict.fromkeys(
        hf(), "of the base: the checkpoint has its own weights"
    )
    bare = convert(run(lawful("tunix")), DEEPMIND, base=hf().replace(tensors={}))
    assert_same_bits(arrays(bare.plan.target), arrays(job.plan.target))
    assert not bare.plan.dropped


def test_to_the_layout_it_has_is_a_copy() -> None:
    source = run(lawful("tunix"))
    job = convert(source, TUNIX, base=hf().replace(tensors={}))
    assert set(job.plan.actions.values()) == {"copied"}
    assert all(job.plan.target[name] is tensor for name, tensor in source.items())


def test_hf_is_its_own_base() -> None:
    job = convert(hf(), HF)
    assert set(job.plan.actions.values()) == {"copied"}
    assert_same_bits(arrays(job.plan.target), arrays(hf()))


@pytest.mark.parametrize("layout", [TUNIX, DEEPMIND], ids=lambda layout: layout.name)
@pytest.mark.parametrize("config", [GEMMA3, MHA], ids=["grouped", "full"])
def test_lora_is_merged_on_the_way(config: dict[str, Any], layout: Any) -> None:
    """The delta of the hand-written oracle, then the law: one rounding, whatever the layout.

    Where float32's own error could carry a value across a tie, one last place is allowed.
    """
    factors = factor_arrays(config)
    job = convert(run(factors), layout, base=hf(config), alpha=ALPHA)
    exact = lora_oracle.merged(arrays(hf(config)), PREFIX, factors, ALPHA)
    expected = {
        name: lora_oracle.rounded_to_bfloat16(array) if array.dtype == np.float64 else array
        for name, array in exact.items()
    }
    lead = layout.default_prefix
    target = {lead + n: a for n, a in by_law(expected, PREFIX, config, layout.name).items()}
    found = arrays(job.plan.target)
    assert found.keys() == target.keys()
    differ = 0
    for name, array in target.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        differ += np.count_nonzero(found[name] != array)
        close = np.isclose(found[name].astype(float), array.astype(float), rtol=2**-7, atol=0)
        assert close.all(), name
    assert differ <= 3
    assert len(job.adapters) == 1
    assert job.plan.counts["merged"] == len(
        {
            n
            for n, a in target.items()
            if a.tobytes() != lawful(layout.name, config, lead)[n].tobytes()
        }
    )


def test_lora_of_a_full_attention_is_merged_for_hf() -> None:
    """One pair changes q, k and v."""
    factors = {n: a for n, a in factor_arrays(MHA).items() if "qkv_einsum" in n}
    job = convert(run(factors), HF, base=hf(MHA), alpha=ALPHA)
    merged = {name for name, action in job.plan.actions.items() if action == "merged"}
    assert merged == {
        f"{PREFIX}layers.{i}.self_attn.{s}_proj.weight" for i in (0, 1) for s in "qkv"
    }


def test_lora_of_the_gate_alone_leaves_up_as_it_is() -> None:
    """Two arrays in Tunix, one in DeepMind's layout: the other half gets nothing."""
    factors = {n: a for n, a in factor_arrays(GEMMA3).items() if "layers.0.mlp.gate_proj" in n}
    job = convert(run(factors), DEEPMIND, base=hf(), alpha=ALPHA)
    name = "transformer/layer_0/mlp/gating_einsum"
    assert [n for n, action in job.plan.actions.items() if action == "merged"] == [name]
    plain, found = lawful("deepmind", lead="transformer/")[name], job.plan.target[name].numpy()
    assert found[1].tobytes() == plain[1].tobytes()
    assert (found[0] != plain[0]).any()
    for_hf = convert(run(factors), HF, base=hf(), alpha=ALPHA).plan.target
    gate = for_hf[f"{PREFIX}layers.0.mlp.gate_proj.weight"].numpy()
    assert found[0].tobytes() == gate.tobytes()


def test_refusals(tiny_model: str) -> None:
    tree = run(lawful("tunix"))
    with pytest.raises(InputError) as caught:
        convert(tree, DEEPMIND)
    assert str(caught.value) == (
        "run: no config.json; give the base model's Hugging Face directory with --base, or name "
        "the model with --model"
    )
    with pytest.raises(ConfigError) as caught:
        convert(tree, HF, model=tiny_model)
    assert str(caught.value) == (
        "run: no config.json, and none is known for gemma-3-tiny; give the base model's Hugging "
        "Face directory with --base"
    )
    with pytest.raises(ConfigError, match="no public model 'gemma-9' is known; known: gemma-2b"):
        convert(tree, DEEPMIND, model="gemma-9")
    with pytest.raises(
        LayoutError, match=r"run: .*expected .* by --model gemma-3-270m, found shape"
    ):
        convert(tree, DEEPMIND, model="gemma-3-270m")
    with pytest.raises(InputError, match="run holds LoRA factors alone"):
        convert(run(factor_arrays(GEMMA3)), TUNIX, base=hf().replace(tensors={}), alpha=ALPHA)
    with pytest.raises(AdapterError, match="it holds no LoRA factors"):
        convert(tree, DEEPMIND, model=tiny_model, alpha=ALPHA)


@pytest.mark.parametrize("layout", [TUNIX, DEEPMIND], ids=lambda layout: layout.name)
def test_a_head_of_its_own_would_be_lost(layout: Any) -> None:
    values = base_arrays(GEMMA3, PREFIX)
    values["lm_head.weight"] = values[f"{PREFIX}embed_tokens.weight"] + 1
    config = {**GEMMA3, "tie_word_embeddings": False}
    source = memory(values, config=config, source="base")
    with pytest.raises(ConfigError, match="tie_word_embeddings is false"):
        convert(source, layout)
    assert_same_bits(arrays(convert(source, HF).plan.target), values)


def test_lora_of_what_the_base_lacks_is_refused() -> None:
    """Keys and values of a layer that shares them, in a base saved by transformers 5."""
    config = {**GEMMA4["text_config"], "attention_k_eq_v": False, "num_kv_shared_layers": 1}
    ours = memory(
        {
            name: array
            for name, array in base_arrays(config, PREFIX).items()
            if not name.startswith(f"{PREFIX}layers.2.self_attn.") or "q_" in name or "o_" in name
        },
        config=config,
        source="base",
    )
    factors = factor_arrays(config)
    with pytest.raises(AdapterError, match=r"layers.2.self_attn.k_proj.weight is not there"):
        convert(run(factors), HF, base=ours, alpha=ALPHA)
    live = {n: a for n, a in factors.items() if "layers.2.attn.kv" not in n}
    assert convert(run(live), HF, base=ours, alpha=ALPHA).plan.counts["merged"] > 0


# The command


def test_the_command_goes_round(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hugging Face to Tunix to DeepMind to Hugging Face, on the disk; a preset in the middle."""
    base = write_base(tmp_path / "hf", GEMMA3, base_arrays(GEMMA3, PREFIX), shards=2)
    tunix, flat, back = tmp_path / "tunix", tmp_path / "flat", tmp_path / "back"
    assert run_cli("convert", base, "--to", "tunix", "--out", tunix) == 0
    assert_same_bits(arrays(open_orbax(tunix)), lawful("tunix"))
    words = ["convert", tunix, "--to", "deepmind", "--model", tiny_model, "--out", flat]
    capsys.readouterr()
    assert run_cli(*words, "--json") == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["model"]["name"] == tiny_model
    assert len(open_orbax(flat)) == len(lawful("deepmind"))
    assert run_cli("convert", flat, "--to", "hf", "--base", base, "--out", back) == 0
    assert_same_bits(read_hf(back), base_arrays(GEMMA3, PREFIX))


def test_the_command_merges(tmp_path: Path) -> None:
    base = write_base(tmp_path / "hf", GEMMA3, base_arrays(GEMMA3, PREFIX))
    trained = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    out = tmp_path / "tunix"
    words = ["convert", trained, "--to", "tunix", "--base", base, "--out", out]
    assert run_cli(*words, "--alpha", ALPHA, "--quiet") == 0
    expected = convert(run(factor_arrays(GEMMA3)), TUNIX, base=hf(), alpha=ALPHA).plan.target
    assert_same_bits(arrays(open_orbax(out)), arrays(expected))


def test_the_command_notes_what_it_fills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model whose last layer shares keys and values, as transformers saves it."""
    config = {**GEMMA4["text_config"], "attention_k_eq_v": False, "num_kv_shared_layers": 1}
    values = {
        name: array
        for name, array in base_arrays(config, PREFIX).items()
        if not name.startswith(f"{PREFIX}layers.2.self_attn.") or "q_" in name or "o_" in name
    }
    base = write_base(tmp_path / "hf", config, values)
    words = ["convert", base, "--to", "tunix", "--out", tmp_path / "out"]
    assert run_cli(*words, "--dry-run") == 0
    captured = capsys.readouterr()
    assert "hf to tunix" in captured.out
    assert "note: 2 tensors that the model has but never reads" in captured.err
    assert not (tmp_path / "out").exists()
    assert run_cli(*words) == 0
    assert not open_orbax(tmp_path / "out")["layers.2.attn.kv_einsum.w"].numpy().any()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--to", "deepmind"], 1, "no config.json; give the base model's Hugging Face directory"),
        (["--to", "deepmind", "--model", "x"], 1, "no public model 'x' is known"),
        (["--to", "hf"], 1, "no config.json; give the base model's Hugging Face directory"),
        (
            ["--to", "hf", "--model", "google/gemma-3-1b-it"],
            1,
            "more like it); --model google/gemma-3-1b-it and tensors belong to different models",
        ),
        (["--to", "max"], 2, "is not one of 'hf', 'tunix', 'tunix-head'"),
        ([], 2, "Missing option '--to'"),
    ],
)
def test_the_command_refuses(
    options: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    write_orbax(memory(lawful("deepmind", lead="transformer/")), tree, form=FORMS["deepmind"])
    out = tmp_path / "out"
    assert run_cli("convert", tree, *options, "--out", out) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not out.exists()
