"""MaxText's layouts: scanned and unscanned trees, values that differ, names of linen and nnx."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from gemma_convert.cli import main
from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.inspect import inspect
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, LAYOUTS, MAXTEXT, MAXTEXT_UNSCANNED, TUNIX, Layout
from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.registry import recognise
from gemma_convert.convert.tensor import Array
from tests.checkpoints import (
    BF16,
    F32,
    arrays,
    base_arrays,
    factor_arrays,
    memory,
    tunix_arrays,
    write_base,
)
from tests.convert.test_rows import text_configs
from tests.maxtext_law import maxtext_tree
from tests.strategies import configs

PREFIX = "model."
LEAD = "params/params/"


def regular(kind: str, layers: int) -> dict[str, Any]:
    """A config of ``kind`` with MaxText's pattern of local and global layers."""
    config = dict(text_configs()[kind])
    period = {"gemma1": 1, "gemma2": 2}.get(kind.split("-")[0], 6)
    config["num_hidden_layers"] = layers
    config["layer_types"] = [
        "sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)
    ]
    if "gemma2" in kind:
        config["query_pre_attn_scalar"] = 24
    if period > 1 and "gemma4" in config["model_type"]:  # transformers makes the last one global
        config["layer_types"][-1] = "full_attention"
    return config


CASES = {
    "gemma1-mqa": 3,
    "gemma1-mha": 2,
    "gemma2": 4,
    "gemma2-mha": 4,
    "gemma3": 14,  # two blocks of six and two layers more
    "gemma3-mha": 6,
    "gemma4": 12,
    "gemma4-with-values": 6,
    "gemma4-moe": 12,
}
KINDS = [(kind, layout) for kind in CASES for layout in (MAXTEXT, MAXTEXT_UNSCANNED)]


def hf(kind: str, dtype: np.dtype[Any] = F32) -> Checkpoint:
    """A base without a file."""
    config = regular(kind, CASES[kind])
    return memory(base_arrays(config, PREFIX, dtype), config=config, source="base")


def law(kind: str, layout: Layout, lead: str = LEAD) -> dict[str, Array]:
    """`hf` as MaxText has it, in float32."""
    tree = maxtext_tree(
        arrays(hf(kind)), PREFIX, regular(kind, CASES[kind]), scanned=layout is MAXTEXT
    )
    return {lead + name: array for name, array in tree.items()}


def assert_close(found: dict[str, Array], expected: dict[str, Array]) -> None:
    """Equal to one rounding of float32: the law's products and ours may associate otherwise."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        np.testing.assert_allclose(found[name], array, rtol=1.2e-7, atol=0, err_msg=name)


@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_the_tree_is_maxtexts(kind: str, layout: Layout) -> None:
    assert_close(arrays(convert(hf(kind), layout).plan.target), law(kind, layout))


@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_the_way_back_is_exact_in_float32(kind: str, layout: Layout) -> None:
    """From bfloat16, with computed tensors in float32, every bit returns."""
    base = hf(kind, BF16)
    there = convert(base, layout, computed_dtype=F32).plan.target
    computed = {name for name, tensor in there.items() if tensor.dtype == F32}
    assert any("embedding" in name for name in computed)
    assert len(computed) == 1 if "gemma4" in kind else len(computed) > 4
    tree = memory(arrays(there), source="run")
    back = convert(tree, HF, base=memory({}, config=base.config), dtype=BF16)
    for name, array in arrays(base).items():
        assert back.plan.target[name].numpy().tobytes() == array.tobytes(), name


@pytest.mark.parametrize("lead", ["params/params/", "params/", "base/", ""])
def test_linens_and_nnxs_names(lead: str) -> None:
    tree = memory(law("gemma3", MAXTEXT, lead), source="run", format="orbax")
    named, spelling = recognise(tree)
    assert (spelling.layout, spelling.prefix) == (MAXTEXT, lead)
    target = convert(named, HF, base=memory({}, config=regular("gemma3", 14)))
    # 1 + w was rounded in the law: half an ulp of a number near 1.8
    for name, array in arrays(hf("gemma3")).items():
        np.testing.assert_allclose(target.plan.target[name].numpy(), array, rtol=0, atol=1.2e-7)


def test_layer_i_of_a_scanned_tree_is_layer_i() -> None:
    """26 layers as four blocks of six and two more; each is filled with its number."""
    config = regular("gemma3", 26)
    weights = base_arrays(config, PREFIX, F32)
    for name, array in weights.items():
        if ".layers." in f".{name}":
            array[...] = int(name.removeprefix(PREFIX).split(".")[1])
    target = convert(memory(weights, config=config), MAXTEXT).plan.target
    down = {name: tensor for name, tensor in target.items() if name.endswith("mlp/wo/kernel")}
    assert len(down) == 8
    for name, tensor in down.items():
        *_, group, position = name.split("/mlp")[0].split("/")
        j = int(position.removeprefix("layers_"))
        numbers = [24 + j] if group == "layers_remainder" else [j, 6 + j, 12 + j, 18 + j]
        values = tensor.numpy()
        values = values[:, None] if group == "layers_remainder" else values
        assert [set(values[:, b].ravel()) for b in range(len(numbers))] == [{n} for n in numbers]
    back = convert(memory(arrays(target)), HF, base=memory({}, config=config)).plan.target
    for i in range(26):
        assert set(back[f"{PREFIX}layers.{i}.mlp.down_proj.weight"].numpy().ravel()) == {i}


def test_a_norm_is_stored_as_what_it_multiplies_by() -> None:
    """1.25 in MaxText is 0.25 for Gemma 3's transformers and 1.25 for Gemma 4's."""
    for kind, value in (("gemma3", 0.25), ("gemma4", 1.25)):
        for layout in (HF, TUNIX):
            tree = law(kind, MAXTEXT_UNSCANNED)
            tree[LEAD + "decoder/decoder_norm/scale"][:] = 1.25
            base = memory({}, config=regular(kind, CASES[kind]))
            target = convert(memory(tree, source="run"), layout, base=base).plan.target
            name = "model.norm.weight" if layout is HF else "final_norm.scale"
            assert set(target[name].numpy()) == {np.float32(value)}


def test_an_offset_is_added_in_float32() -> None:
    """15.8125 + 1 is no bfloat16: float32 keeps it, and a bfloat16 target says it is lossy."""
    base = hf("gemma3", BF16)
    norms = {"model.norm.weight": np.full(10, 15.8125, BF16)}
    base = memory(arrays(base) | norms, config=base.config)
    name = LEAD + "decoder/decoder_norm/scale"
    exact = convert(base, MAXTEXT, computed_dtype=F32).plan
    assert set(exact.target[name].numpy()) == {np.float32(16.8125)}
    assert not exact.target.notes
    lossy = convert(base, MAXTEXT).plan
    assert set(lossy.target[name].numpy().astype(F32)) == {np.float32(16.75)}
    (note,) = lossy.target.notes
    assert note == (
        "hf and maxtext store other values in 50 tensors, such as "
        "params/params/token_embedder/embedding: they are computed in float32 and stored in "
        "bfloat16, from which not all of hf's can be computed again; --computed-dtype float32 "
        "stores them so that they can"
    )


def test_the_note_tells_the_direction() -> None:
    """Back to Hugging Face it is MaxText's values that are lost, and one dtype that keeps them."""
    base = hf("gemma3", BF16)
    tree = memory(arrays(convert(base, MAXTEXT).plan.target), source="run")
    empty = memory({}, config=base.config)
    (note,) = convert(tree, HF, base=empty).plan.target.notes
    assert note == (
        "maxtext and hf store other values in 86 tensors, such as model.embed_tokens.weight: they "
        "are computed in float32 and stored in bfloat16, from which not all of maxtext's can be "
        "computed again; --dtype float32 stores them so that they can"
    )
    assert not convert(tree, HF, base=empty, dtype=F32).plan.target.notes


def test_a_mixture_of_dtypes_is_told() -> None:
    """What MaxText stored in float32 stays so in a Hugging Face output, beside bfloat16."""
    base = hf("gemma3", BF16)
    tree = memory(arrays(convert(base, MAXTEXT, computed_dtype=F32).plan.target), source="run")
    empty = memory({}, config=base.config)
    plan = convert(tree, HF, base=empty).plan
    assert {str(tensor.dtype) for tensor in plan.target.values()} == {"bfloat16", "float32"}
    assert plan.target.notes == (
        "the tensors keep the dtypes of their sources, which differ: 86 in float32 "
        "(model.embed_tokens.weight), 98 in bfloat16 (model.layers.0.self_attn.q_proj.weight); "
        "--dtype stores all in one",
    )
    assert not convert(tree, HF, base=empty, dtype=F32).plan.target.notes


def test_the_root_is_rounded_to_bfloat16_for_gemma_3() -> None:
    """The root of 1152 is 33.94; MaxText multiplies Gemma 3's embedding by 34."""
    config = regular("gemma3", 6) | {"hidden_size": 1152}
    weights = base_arrays(config, PREFIX)
    weights["model.embed_tokens.weight"][...] = 1.0
    there = convert(memory(weights, config=config), MAXTEXT).plan.target
    embedding = there[LEAD + "token_embedder/embedding"].numpy()
    assert set(embedding.ravel().astype(F32)) == {np.float32(34.0)}
    back = convert(memory(arrays(there)), HF, base=memory({}, config=config)).plan.target
    assert set(back["model.embed_tokens.weight"].numpy().ravel().astype(F32)) == {1.0}


def test_the_27b_scales_its_queries_as_the_model_does() -> None:
    """By 144 ** -0.5, not by its head dimension's root; then the logits are the same."""
    config = regular("gemma2", 2) | {"query_pre_attn_scalar": 144, "head_dim": 128}
    weights = base_arrays(config, PREFIX, F32)
    weights["model.layers.0.self_attn.q_proj.weight"][...] = 12.0
    there = convert(memory(weights, config=config), MAXTEXT_UNSCANNED).plan.target
    query = there[LEAD + "decoder/layers_0/self_attention_local/query/kernel"].numpy()
    np.testing.assert_allclose(query, 1.0, rtol=1.2e-7)


def test_queries_are_merged_before_they_are_scaled_and_rounded() -> None:
    """A LoRA delta takes part in the scale, not in an offset; one rounding at the end."""
    config = regular("gemma2", 2) | {"query_pre_attn_scalar": 24}
    base = memory(base_arrays(config, PREFIX), config=config, source="base")
    factors = memory(factor_arrays(config), source="run", format="orbax")
    plain = convert(factors, TUNIX, base=base, alpha=5.0, dtype=F32).plan.target
    scaled = convert(factors, MAXTEXT_UNSCANNED, base=base, alpha=5.0).plan.target
    # (n, d, h) and (d, n, h)
    expected = plain["layers.1.attn.q_einsum.w"].numpy().transpose(1, 0, 2) * np.float32(24**-0.5)
    name = LEAD + "decoder/layers_0/self_attention_global/query/kernel"
    found = scaled[name].numpy()
    assert found.dtype == BF16
    differ = found != expected.astype(BF16)
    # the merge multiplies the weight and the delta each by the scale: sums near a tie may differ
    assert differ.mean() < 0.01
    np.testing.assert_allclose(found.astype(F32), expected, rtol=2**-8)


def test_dead_keys_and_values_are_left_out() -> None:
    config = text_configs()["gemma4-per-layer"]
    base = memory(base_arrays(config, PREFIX), config=config, source="base")
    plan = convert(base, MAXTEXT_UNSCANNED).plan
    dead = [name for name, reason in plan.dropped.items() if "never reads it" in reason]
    assert dead
    assert all(".self_attn." in name for name in dead)
    back = convert(memory(arrays(plan.target)), TUNIX, base=memory({}, config=config)).plan.target
    assert back.keys() == tunix_arrays(config).keys()
    assert any("filled with zeros" in note for note in back.notes)
    tree = memory(arrays(plan.target), source="run")
    again = convert(tree, HF, base=base).plan.target
    assert again.keys() == base.keys()
    assert all(again[name].numpy().tobytes() == base[name].numpy().tobytes() for name in dead)
    assert any(f"{len(dead)} tensors" in n and "taken from the base" in n for n in again.notes)


def test_models_that_maxtext_does_not_scan() -> None:
    config = text_configs()["gemma4-per-layer"]
    base = memory(base_arrays(config, PREFIX), config=config, source="base")
    with pytest.raises(LayoutError, match="with per-layer embeddings; use layout"):
        convert(base, MAXTEXT)


def test_layers_that_do_not_repeat_cannot_be_scanned() -> None:
    config = regular("gemma3", 12)
    config["layer_types"][8] = "full_attention"
    base = memory(base_arrays(config, PREFIX), config=config, source="base")
    with pytest.raises(LayoutError, match="do not repeat in blocks; use layout maxtext-unscanned"):
        convert(base, MAXTEXT)


def test_a_number_of_layers_that_disagrees_is_refused() -> None:
    tree = memory(law("gemma3", MAXTEXT), source="run")
    base = memory({}, config=regular("gemma3", 20))
    with pytest.raises(
        LayoutError, match=r"expected \[3\] layers on axis 1 .* found shape \[10, 2"
    ):
        convert(tree, HF, base=base)


def planned(base: Checkpoint, layout: Layout) -> Checkpoint | None:
    """``base`` in ``layout``, or None where its layers cannot be stacked, which is said."""
    try:
        return convert(base, layout, computed_dtype=F32).plan.target
    except LayoutError as error:
        if re.search("cannot hold|cannot be stacked", str(error)):
            return None
        raise


@given(configs())
def test_any_model_there_and_back(config: dict[str, Any]) -> None:
    """What can be scanned is, bit for bit both ways, whatever the sizes."""
    base = memory(base_arrays(config, PREFIX), config=config, source="base")
    for layout in (MAXTEXT, MAXTEXT_UNSCANNED, LAYOUTS["deepmind-stacked"], LAYOUTS["tunix-head"]):
        there = planned(base, layout)
        if there is None:
            continue
        tree = memory(arrays(there), source="run")
        assert recognise(tree)[1].layout.name in (layout.name, layout.like, layout.unstacked)
        back = convert(tree, HF, base=memory({}, config=config), dtype=BF16, layout=layout)
        for name, tensor in back.plan.target.items():
            assert tensor.numpy().tobytes() == base[name].numpy().tobytes(), (layout.name, name)


@pytest.mark.parametrize("layout", [MAXTEXT, MAXTEXT_UNSCANNED, LAYOUTS["deepmind-stacked"]])
@pytest.mark.parametrize("kind", CASES)
def test_family_and_layers_are_told_without_a_config(kind: str, layout: Layout) -> None:
    tree = memory(arrays(convert(hf(kind, BF16), layout).plan.target), source="run", format="orbax")
    report = inspect(tree)
    assert report["layout"]["name"] == layout.name
    assert report["model"]["layers"] == CASES[kind]
    assert kind.split("-")[0] in report["model"]["family"]


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HF to a MaxText checkpoint on the disk and back, with what was lost in the ledger."""
    config = regular("gemma3", 14) | {"architectures": ["Gemma3ForCausalLM"], "dtype": "bfloat16"}
    base = write_base(tmp_path / "base", config, base_arrays(config, PREFIX))
    there, back = tmp_path / "there", tmp_path / "back"
    command = ["hf-to-orbax", str(base), "--layout", "maxtext", "--out", str(there)]
    assert main([*command, "--computed-dtype", "float32"]) == 0
    told = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "0 of them, as stored, do not give hf's value back" in told
    assert (there / "0" / "items" / "_METADATA").is_file()
    names = set(open_orbax(there))
    assert "params.params.decoder.layers.layers_0.self_attention.query.kernel" in names
    command = ["convert", str(there), "--to", "hf", "--base", str(base), "--out", str(back)]
    assert main([*command, "--dtype", "bfloat16"]) == 0
    assert _same(base, back)
    ledger = json.loads((back / "conversion.json").read_text())
    assert ledger["layouts"] == {"from": "maxtext", "to": "hf"}
    assert ledger["computed"]["not_exact"] == 0
    assert ledger["counts"]["computed"] == 14 * 6 + 2


def _same(one: Path, other: Path) -> bool:
    from safetensors.numpy import load_file

    first, second = (load_file(path / "model.safetensors") for path in (one, other))
    return first.keys() == second.keys() and all(
        np.array_equal(first[name].view(np.uint16), second[name].view(np.uint16)) for name in first
    )


def test_how_many_values_cannot_come_back_is_counted() -> None:
    """Of 4096 norms as they occur in models, some change in bfloat16; float32 loses none."""
    values = np.random.default_rng(0).normal(0.0, 0.3, 4096).astype(BF16)
    config = regular("gemma3", 6) | {"hidden_size": 4096, "intermediate_size": 2}
    weights = base_arrays(config, PREFIX) | {"model.norm.weight": values}
    name = LEAD + "decoder/decoder_norm/scale"
    lost = {}
    for dtype in (BF16, F32):
        tensor = convert(memory(weights, config=config), MAXTEXT, computed_dtype=dtype).plan.target
        stored = tensor[name].numpy().astype(F32)
        lost[dtype] = tensor[name].lost  # type: ignore[attr-defined]
        expected = np.count_nonzero((stored - np.float32(1)).astype(BF16) != values)
        assert lost[dtype] == expected
    assert lost[F32] == 0 < lost[BF16]
    assert np.dtype(ml_dtypes.bfloat16) == BF16
