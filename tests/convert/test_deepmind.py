"""DeepMind's layout on the disk: flat and nested trees, and Tunix's own reader of flat ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.inspect import inspect
from gemma_convert.convert.jobs import convert, hf_to_orbax
from gemma_convert.convert.layouts import DEEPMIND, HF, TUNIX
from gemma_convert.convert.readers import open_orbax, open_safetensors
from gemma_convert.convert.registry import recognise
from gemma_convert.convert.tensor import Array
from gemma_convert.convert.writers.orbax import verify_orbax, write_orbax
from gemma_convert.convert.writers.orbax_tree import FORMS, form_of
from tests import layout_law, tiny
from tests.checkpoints import GEMMA3, GEMMA4, arrays, assert_same_bits, base_arrays, memory

SAMPLES = Path(__file__).parents[1] / "data" / "orbax_samples"
TEXT4 = GEMMA4["text_config"]
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma1": {**GEMMA3, "model_type": "gemma", "num_key_value_heads": 6},
    "gemma2": {**GEMMA3, "model_type": "gemma2"},
    "gemma3": GEMMA3,
    "gemma4": TEXT4,
    "gemma4-moe": {
        **TEXT4,
        "enable_moe_block": True,
        "num_experts": 5,
        "moe_intermediate_size": 17,
    },
}


def hf(kind: str) -> Checkpoint:
    """A Hugging Face checkpoint in memory."""
    return memory(base_arrays(CONFIGS[kind], "model."), config=CONFIGS[kind], source="base")


def lawful(kind: str) -> dict[str, Array]:
    """DeepMind's arrays of `hf`, by the law alone."""
    return layout_law.by_law(arrays(hf(kind)), "model.", CONFIGS[kind], "deepmind")


def save_standard(tree: Mapping[str, Any], directory: Path) -> Path:
    """Save as DeepMind's library does."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(directory, tree)
    checkpointer.wait_until_finished()
    checkpointer.close()
    return directory


def restore_standard(directory: Path) -> dict[str, Any]:
    """Restore as Tunix and DeepMind's library do."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    tree: dict[str, Any] = checkpointer.restore(directory)
    checkpointer.close()
    return tree


def nested(values: Mapping[str, Array], *, leaves: bool) -> dict[str, Any]:
    """A tree of one key a word; where not ``leaves``, the arrays of an MLP are ``{"w": array}``."""
    tree: dict[str, Any] = {}
    for name, array in values.items():
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        is_mlp = path[-1].startswith("mlp") and last in ("gating_einsum", "linear")
        node[last] = {"w": array} if is_mlp and not leaves else array
    return tree


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("kind", CONFIGS)
def test_flat_trees_are_written_and_read_back(kind: str, tmp_path: Path) -> None:
    """The tree that Orbax itself restores has Google's keys; ours reads back bit for bit."""
    job = hf_to_orbax(hf(kind), layout=DEEPMIND)
    out = tmp_path / "flat"
    out.mkdir()
    sums = write_orbax(job.plan.target, out, form=FORMS["deepmind"])
    verify_orbax(job.plan.target, out, sums, form=FORMS["deepmind"], progress=lambda _: None)
    restored = {
        f"{path}/{leaf}": np.asarray(array)
        for path, leaves in restore_standard(out).items()
        for leaf, array in leaves.items()
    }
    expected = {f"transformer/{name}": array for name, array in lawful(kind).items()}
    for name in [n for n in expected if n.endswith(("/mlp/gating_einsum", "/mlp/linear"))]:
        expected[f"{name}/w"] = expected.pop(name)
    assert_same_bits(restored, expected)
    back = convert(open_orbax(out), HF, base=hf(kind).replace(tensors={}))
    assert_same_bits(arrays(back.plan.target), arrays(hf(kind)))


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_nested_trees_are_read(kind: str, leaves: bool, tmp_path: Path) -> None:
    """Written by Orbax; ``mlp/linear`` as an array and as ``{"w": array}``."""
    directory = save_standard(nested(lawful(kind), leaves=leaves), tmp_path / "nested")
    job = convert(open_orbax(directory), HF, base=hf(kind).replace(tensors={}))
    assert_same_bits(arrays(job.plan.target), arrays(hf(kind)))


def test_nested_and_flat_are_one_layout(tmp_path: Path) -> None:
    directory = save_standard(nested(lawful("gemma3"), leaves=True), tmp_path / "nested")
    job = convert(open_orbax(directory), TUNIX, base=hf("gemma3").replace(tensors={}))
    expected = layout_law.by_law(arrays(hf("gemma3")), "model.", GEMMA3, "tunix")
    assert_same_bits(arrays(job.plan.target), expected)
    report = inspect(open_orbax(directory))
    assert (report["layout"]["name"], report["layout"]["prefix"]) == ("deepmind", "")
    assert report["model"]["family"] == "gemma3"


def test_a_gap_is_named_as_the_layout_spells_it(tmp_path: Path) -> None:
    values = lawful("gemma3")
    del values["layer_1/mlp/linear"]
    directory = save_standard(nested(values, leaves=False), tmp_path / "nested")
    with pytest.raises(LayoutError, match=r"layer_1/mlp/linear: missing \(down of layer 1\)"):
        convert(open_orbax(directory), HF, base=hf("gemma3").replace(tensors={}))


@pytest.mark.parametrize(
    ("sample", "prefix", "names"),
    [
        (
            "standard_flat",
            "transformer/",
            {
                "transformer/embedder/input_embedding",
                "transformer/layer_0/attn/q_einsum/w",
                "transformer/layer_0/mlp/gating_einsum",
            },
        ),
        ("standard_nested", "", {"layer_0/attn/q_einsum/w"}),
    ],
)
def test_samples_are_recognised(sample: str, prefix: str, names: set[str]) -> None:
    """Names as the templates write them, whatever stands on the disk."""
    named, spelling = recognise(open_orbax(SAMPLES / sample))
    assert (spelling.layout, spelling.prefix) == (DEEPMIND, prefix)
    assert set(named) == names


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:tunix\.")
@pytest.mark.filterwarnings("ignore:'sharding' is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", ["gemma3", "gemma3-mha"])
def test_tunix_reads_our_flat_trees(case: str, tmp_path: Path) -> None:
    """Its own mapper of Google's Gemma 3 checkpoints gives the arrays of its layout, and ours."""
    import jax.numpy as jnp
    from tunix.models.gemma3 import params

    tiny.hf_model(case).save_pretrained(tmp_path / "hf")
    base = open_safetensors(tmp_path / "hf")
    (tmp_path / "flat").mkdir()
    flat = hf_to_orbax(base, layout=DEEPMIND).plan.target
    write_orbax(flat, tmp_path / "flat", form=FORMS["deepmind"])
    _, config = tiny.tunix_class(case)
    model = params.create_model_from_checkpoint(
        str(tmp_path / "flat"), config, dtype=jnp.dtype(np.float32)
    )
    assert_same_bits(tiny.tunix_arrays(model), arrays(hf_to_orbax(base).plan.target))


def test_a_model_with_experts_is_written_nested(tmp_path: Path) -> None:
    """The library's reader loses the router's last key of flat trees, of nested ones none."""
    target = convert(hf("gemma4-moe"), DEEPMIND).plan.target
    form = form_of(DEEPMIND, target)
    assert form.keys("transformer/layer_0/mlp/router_logits/w") == (
        *("layer_0", "mlp", "router_logits", "w"),
    )
    directory = tmp_path / "nested"
    directory.mkdir()
    write_orbax(target, directory, form=form)
    named, spelling = recognise(open_orbax(directory))
    assert (spelling.layout, spelling.prefix) == (DEEPMIND, "")
    assert_same_bits(
        {f"transformer/{name}": array for name, array in arrays(named).items()}, arrays(target)
    )
    dense = convert(hf("gemma4"), DEEPMIND).plan.target
    assert form_of(DEEPMIND, dense) is FORMS["deepmind"]
