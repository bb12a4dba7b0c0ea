"""Vision and audio towers in every layout: values, names, round trips, what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import ConfigError, LayoutError
from gemma_convert.convert.inspect import inspect
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, LAYOUTS, Layout, Spelling
from gemma_convert.convert.model import read_model
from gemma_convert.convert.readers import open_checkpoint
from gemma_convert.convert.registry import families
from gemma_convert.convert.relayout import relayout
from gemma_convert.convert.stack import stacked
from gemma_convert.convert.tensor import Array, ArrayTensor
from gemma_convert.convert.writers.orbax import verify_orbax, write_orbax
from gemma_convert.convert.writers.orbax_tree import FORMS
from tests import tiny_towers, tower_law
from tests.checkpoints import BF16, F32, arrays, assert_same_bits, memory
from tests.strategies import tower_configs

PAIRS = [
    (case, layout)
    for case, layouts in {
        "gemma3": ("tunix", "tunix-head", "deepmind", "maxtext", "maxtext-unscanned"),
        "gemma4": ("tunix-head", "deepmind", "maxtext-unscanned"),
        "gemma4-e2b": ("tunix-head", "deepmind"),
    }.items()
    for layout in layouts
]
TOWERS = ("vision_encoder", "audio_encoder", "embedder/mm_", "embedder/audio_")
CLIPPED = "model.vision_tower.encoder.layers.1.self_attn."


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories that transformers saved, by case and seed."""

    @cache
    def directory(case: str, seed: int = 0) -> Path:
        return tiny_towers.save(case, tmp_path_factory.mktemp(case) / "hf", seed)

    return directory


def hub(name: str) -> str:
    """How the Hub names what transformers 5 saves."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def hub_arrays(directory: Path, case: str) -> dict[str, Array]:
    """What transformers saved, named as on the Hub."""
    found = arrays(open_checkpoint(directory))
    return {hub(n): a for n, a in found.items()} if case == "gemma3" else found


def tower_names(checkpoint: Checkpoint, layout: Layout) -> dict[str, str]:
    """Names of the towers' tensors, without prefix and with slashes, to the names as they are."""
    found = {}
    for name in checkpoint:
        short = name.removeprefix(layout.default_prefix).replace(".", "/")
        if short.startswith(TOWERS):
            found[short] = name
    return found


def without_towers(checkpoint: Checkpoint, words: tuple[str, ...]) -> Checkpoint:
    kept = {n: t for n, t in checkpoint.items() if not any(word in n for word in words)}
    return checkpoint.replace(tensors=kept)


def tree_of(directory: Path, layout: Layout, **options: Any) -> Checkpoint:
    """What is made of a Hugging Face directory, as a checkpoint of its own."""
    made = convert(open_checkpoint(directory), layout, **options).plan.target
    return memory(arrays(made), source="tree", format="orbax")


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_values_are_those_of_the_law(saved: Any, case: str, name: str) -> None:
    """Every tensor of the towers, no other, bit for bit."""
    source, layout = open_checkpoint(saved(case)), LAYOUTS[name]
    target = convert(source, layout).plan.target
    style = {"tunix-head": "tunix", "maxtext-unscanned": "maxtext"}.get(name, name)
    expected = tower_law.towers(hub_arrays(saved(case), case), source.config, style)
    names = tower_names(target, layout)
    assert_same_bits({short: target[full].numpy() for short, full in names.items()}, expected)
    copies = {name for name in target.dropped if ".v_proj." in name or ".up_proj." in name}
    assert target.dropped.keys() == copies
    assert len(copies) == (3 * 2 * 4 if case == "gemma4-e2b" else 0)  # layers, modules, bounds


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_there_and_back_through_files(saved: Any, case: str, name: str, tmp_path: Path) -> None:
    """The towers come from the source, not from the base, under the base's names.

    Keys and values that nothing reads are left out, as the base has none.
    """
    layout, form, base = LAYOUTS[name], FORMS[name], open_checkpoint(saved(case, 1))
    # MaxText stores 1 + w of a norm: float32 of it is what bfloat16 comes back from
    made = convert(open_checkpoint(saved(case)), layout, computed_dtype=F32).plan.target
    sums = write_orbax(made, tmp_path / "tree", form=form)
    verify_orbax(made, tmp_path / "tree", sums, form=form, progress=lambda _: None)
    job = convert(open_checkpoint(tmp_path / "tree"), HF, base=base, dtype=BF16)
    original = arrays(open_checkpoint(saved(case)))
    back = arrays(job.plan.target)
    assert_same_bits(back, original)


@pytest.mark.parametrize(
    ("case", "name", "what"),
    [
        ("gemma4", "tunix", "the vision tower of this model, gemma4_vision"),
        ("gemma4-e2b", "tunix", "the audio tower of this model, gemma4_audio"),
        ("gemma4-e2b", "maxtext-unscanned", "the vision tower of this model, gemma4_vision"),
        ("gemma4-e2b", "maxtext-unscanned", "the audio tower of this model, gemma4_audio"),
    ],
)
def test_a_layout_without_the_tower_leaves_it_out_and_says_so(
    saved: Any, case: str, name: str, what: str
) -> None:
    target = convert(open_checkpoint(saved(case)), LAYOUTS[name]).plan.target
    assert not tower_names(target, LAYOUTS[name])
    reasons = set(target.dropped.values())
    assert f"layout {name} has no names for {what}" in reasons
    assert {n.split(".")[1] for n in target.dropped} <= {
        *("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
    }


@pytest.mark.parametrize("bound", ["input_min", "output_max"])
@pytest.mark.parametrize("name", ["tunix-head", "deepmind"])
def test_unequal_clip_bounds_are_refused_by_both_names(saved: Any, name: str, bound: str) -> None:
    source = open_checkpoint(saved("gemma4-e2b"))
    key, value = (f"{CLIPPED}{letter}_proj.{bound}" for letter in "kv")
    other = ArrayTensor(np.asarray(-7.5).astype(BF16))
    wrong = source.replace(tensors={**source.tensors, value: other})
    message = rf"{key} and {value} differ \(.*, -7.5\), but layout {name} has one tensor for both"
    with pytest.raises(LayoutError, match=message):
        convert(wrong, LAYOUTS[name])
    assert set(convert(wrong, HF).plan.target) == set(source)  # copied, whatever they are


def test_infinite_bounds_are_bounds(saved: Any) -> None:
    """Fresh models have no bounds: minus and plus infinity."""
    source = open_checkpoint(saved("gemma4-e2b"))
    ends = {"min": -np.inf, "max": np.inf}
    bounds = {
        name: ArrayTensor(np.asarray(ends[name[-3:]]).astype(BF16))
        for name in source
        if name.endswith(("_min", "_max"))
    }
    tree = memory(
        arrays(
            convert(
                source.replace(tensors={**source.tensors, **bounds}), LAYOUTS["deepmind"]
            ).plan.target
        ),
        source="tree",
    )
    back = convert(tree, HF, base=source).plan.target
    assert all(back[name].numpy() == bound.array for name, bound in bounds.items())


@pytest.mark.parametrize("case", ["gemma3", "gemma4-e2b"])
def test_text_alone_becomes_the_whole_with_a_base(saved: Any, case: str) -> None:
    """Text from the tree, towers from the base, tensor for tensor the base's own."""
    layout, base = LAYOUTS["tunix"], open_checkpoint(saved(case, 1))
    text = without_towers(tree_of(saved(case), layout), ("vision_encoder", "embedder.mm_"))
    target = convert(text, HF, base=base).plan.target
    original = open_checkpoint(saved(case))
    for name in base:
        if "language_model" in name:
            assert target[name].numpy().tobytes() == original[name].numpy().tobytes()
        else:
            assert target[name] is base[name]


def test_text_alone_becomes_text_alone(saved: Any) -> None:
    """Without a base there is nothing to make a tower of, in JAX as in Hugging Face."""
    tree = without_towers(
        tree_of(saved("gemma3"), LAYOUTS["tunix"]), ("vision_encoder", "embedder.mm_")
    )
    config = open_checkpoint(saved("gemma3")).config
    target = convert(tree.replace(config=config), LAYOUTS["deepmind"]).plan.target
    assert not tower_names(target, LAYOUTS["deepmind"])
    flat = convert(tree.replace(config=config["text_config"]), HF).plan.target
    assert all(name.startswith("model.") for name in flat)
    with pytest.raises(ConfigError, match=r"config\.json has vision_config, but no such weights"):
        convert(tree.replace(config=config), HF)


@pytest.mark.parametrize("name", ["tunix", "deepmind"])
def test_a_base_fills_in_what_a_jax_tree_lacks(saved: Any, name: str) -> None:
    """From JAX to JAX, too: the text of the source, the tower of the base."""
    tree = without_towers(
        tree_of(saved("gemma3"), LAYOUTS["tunix"]), ("vision_encoder", "embedder.mm_")
    )
    base = open_checkpoint(saved("gemma3", 1))
    target = convert(tree, LAYOUTS[name], base=base).plan.target
    expected = tower_law.towers(hub_arrays(saved("gemma3", 1), "gemma3"), base.config, name)
    names = tower_names(target, LAYOUTS[name])
    assert_same_bits({short: target[full].numpy() for short, full in names.items()}, expected)


def test_names_are_the_hubs_without_a_base(saved: Any) -> None:
    config = open_checkpoint(saved("gemma3")).config
    tree = tree_of(saved("gemma3"), LAYOUTS["deepmind"]).replace(config=config)
    target = convert(tree, HF).plan.target
    expected = hub_arrays(saved("gemma3"), "gemma3")
    assert_same_bits(arrays(target), expected)


def test_names_go_with_those_of_the_text(saved: Any) -> None:
    """In memory every name of transformers begins with model."""
    in_memory = {
        "model." + n.replace("language_model.model.", "language_model."): a
        for n, a in hub_arrays(saved("gemma3"), "gemma3").items()
    }
    config = open_checkpoint(saved("gemma3")).config
    base = memory(in_memory, config=config, source="base", format="safetensors")
    tree = tree_of(saved("gemma3", 1), LAYOUTS["tunix"])
    assert convert(tree, HF, base=base).plan.target.tensors.keys() == in_memory.keys()
    target = convert(base, LAYOUTS["tunix"]).plan.target
    expected = arrays(convert(open_checkpoint(saved("gemma3")), LAYOUTS["tunix"]).plan.target)
    assert_same_bits(arrays(target), expected)


def test_a_flat_tree_has_deepminds_name_for_the_tower(saved: Any, tmp_path: Path) -> None:
    """``load_params`` of gemma git 7691fd4 and Tunix's reader know it by that name alone."""
    import orbax.checkpoint as ocp

    made = convert(open_checkpoint(saved("gemma3")), LAYOUTS["deepmind"]).plan.target
    write_orbax(made, tmp_path / "tree", form=FORMS["deepmind"])
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(tmp_path / "tree").item_metadata
    siglip = {name for name in tree if name.startswith("SigLiPFromPatches_0/siglip_encoder")}
    assert {name.split("/")[0] for name in tree} == {"transformer", "SigLiPFromPatches_0"}
    assert set(tree["SigLiPFromPatches_0/siglip_encoder/embedding"]) == {"kernel", "bias"}
    assert len(siglip) == 3 + 3 * 8  # embedding, table, last norm; a layer's modules


def test_an_incomplete_tower_is_refused(saved: Any) -> None:
    source = open_checkpoint(saved("gemma3"))
    name = "vision_tower.encoder.layers.2.mlp.fc1.bias"
    tensors = {n: t for n, t in source.items() if n != name}
    with pytest.raises(LayoutError, match=rf"{hub(name)}: missing \(fc1_bias of layer 2\)"):
        convert(source.replace(tensors=tensors), LAYOUTS["tunix"])


def test_a_tower_of_another_size_is_refused(saved: Any) -> None:
    source = open_checkpoint(saved("gemma3"))
    vision = {**source.config["vision_config"], "intermediate_size": 24}
    wrong = source.replace(config={**source.config, "vision_config": vision})
    with pytest.raises(LayoutError, match=r"fc1.weight: expected f d = 24 35 by config.json"):
        convert(wrong, LAYOUTS["deepmind"])


@pytest.mark.parametrize("to", ["hf", "tunix-head"])
def test_a_clip_bound_of_another_shape_is_refused(saved: Any, to: str) -> None:
    """Transformers has it as a scalar; a copy of one element would not load."""
    source = open_checkpoint(saved("gemma4-e2b"))
    name = next(n for n in source if n.endswith("q_proj.input_min"))
    bound = ArrayTensor(source[name].numpy().reshape(1))
    wrong = source.replace(tensors={**source.tensors, name: bound})
    with pytest.raises(LayoutError, match=rf"{name}: expected .* by config.json, found shape \[1"):
        convert(wrong, LAYOUTS[to])


def test_a_tower_of_a_base_is_looked_at_before_it_is_copied(saved: Any) -> None:
    base = open_checkpoint(saved("gemma3"))
    name = "vision_tower.encoder.layers.2.mlp.fc1.bias"
    without = base.replace(tensors={n: t for n, t in base.items() if n != name})
    tree = without_towers(
        tree_of(saved("gemma3", 1), LAYOUTS["tunix"]), ("vision_encoder", "siglip", "embedder.mm_")
    )
    with pytest.raises(LayoutError, match=rf"{hub(name)}: missing \(fc1_bias of layer 2\)"):
        convert(tree, HF, base=without)


def test_a_senseless_config_of_a_tower_matters_only_to_the_tower(saved: Any) -> None:
    source = open_checkpoint(saved("gemma3"))
    vision = {**source.config["vision_config"], "num_attention_heads": 4}
    wrong = source.replace(config={**source.config, "vision_config": vision})
    assert set(convert(wrong, HF).plan.target) == set(source)
    with pytest.raises(ConfigError, match="hidden_size is 35, expected a multiple of num_att"):
        convert(wrong, LAYOUTS["tunix"])


def test_a_tower_of_which_the_config_says_nothing_is_left_out(saved: Any) -> None:
    source = open_checkpoint(saved("gemma3"))
    config = {key: value for key, value in source.config.items() if key != "vision_config"}
    target = convert(source.replace(config=config), LAYOUTS["tunix"]).plan.target
    assert set(target.dropped.values()) == {
        "not part of the text model, nor of a tower known here that config.json describes"
    }
    assert len(target.dropped) == len([n for n in source if "language_model" not in n])


@pytest.mark.parametrize(("case", "name"), [("gemma3", "hf"), ("gemma4-e2b", "hf"), *PAIRS])
def test_inspect_shows_the_towers(saved: Any, case: str, name: str) -> None:
    source = open_checkpoint(saved(case))
    report = inspect(source if name == "hf" else tree_of(saved(case), LAYOUTS[name]))
    vision = "siglip" if case == "gemma3" else "gemma4_vision"
    expected = [("vision", vision, 3)] + [("audio", "gemma4_audio", 2)] * ("e2b" in case)
    assert [(t["part"], t["name"], t["layers"]) for t in report["towers"]] == expected
    if name == "hf":
        assert not report["disagreements"]
        others = [n for n in source if "language_model" not in n]
        assert sum(t["tensors"] for t in report["towers"]) == len(others)
        assert sum(t["parameters"] for t in report["towers"]) == sum(source[n].size for n in others)
    assert report["layout"]["evidence"].split(" names")[0].split(" of ")[0] == str(
        report["tensors"]
    )


def test_the_layout_with_towers_is_recognised(saved: Any) -> None:
    """Tunix 0.1.7 and later name the text alike, but only the later have Gemma 4's towers."""
    tree = tree_of(saved("gemma4"), LAYOUTS["tunix-head"])
    assert inspect(tree)["layout"]["name"] == "tunix-head"
    text = without_towers(tree, ("vision_encoder", "embedder.mm_"))
    assert inspect(text)["layout"]["name"] == "tunix"


def test_inspect_tells_where_a_tower_disagrees(saved: Any) -> None:
    source = open_checkpoint(saved("gemma3"))
    short = {n: t for n, t in source.items() if not n.endswith("mm_input_projection_weight")}
    found = inspect(source.replace(tensors=short))["disagreements"]
    assert found == ["multi_modal_projector.mm_input_projection_weight: missing (projection)"]
    vision = {**source.config["vision_config"], "num_attention_heads": 4}
    wrong = source.replace(config={**source.config, "vision_config": vision})
    assert "hidden_size is 35, expected a multiple" in inspect(wrong)["disagreements"][0]


@settings(max_examples=40)
@given(tower_configs())
def test_there_and_back_at_any_size(config: dict[str, Any]) -> None:
    """Every tower through every layout that has it: names, shapes and bits come back."""
    model = read_model(config, families())
    assert model.towers
    for tower in model.towers:
        network = tower.network()
        deepmind = Spelling(LAYOUTS["deepmind"], "transformer/")
        random = np.random.default_rng(1)
        values = {
            deepmind.prefix + name: random.normal(0, 1, parameter.shape(deepmind.layout))
            for parameter in network.parameters()
            for name, _ in parameter.parts(deepmind.layout)
        }
        jax = stacked(memory(values, source="jax"), network, deepmind)
        hf = relayout(jax, network, deepmind, Spelling(HF, "model."))
        assert_same_bits(
            arrays(relayout(hf, network, Spelling(HF, "model."), deepmind)), arrays(jax)
        )
        for layout in LAYOUTS.values():
            if network.is_in(layout):
                there = relayout(hf, network, Spelling(HF, "model."), Spelling(layout, ""))
                back = relayout(there, network, Spelling(layout, ""), Spelling(HF, ""))
                shorter = {name.removeprefix("model."): a for name, a in arrays(hf).items()}
                norm = "multi_modal_projector.mm_soft_emb_norm.weight"  # 1 + w in MaxText
                if "maxtext" in layout.name and norm in shorter:
                    assert np.allclose(back[norm].numpy(), shorter.pop(norm), rtol=0, atol=1e-15)
                    back = back.replace(tensors={n: t for n, t in back.items() if n != norm})
                assert_same_bits(arrays(back), shorter)
