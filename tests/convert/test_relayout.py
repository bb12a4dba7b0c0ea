"""Conversion between layouts: bit-exact both ways, by any box, refused where it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.fit import disagreements
from gemma_convert.convert.jobs import hf_to_orbax, orbax_to_hf
from gemma_convert.convert.layouts import DEEPMIND, HF, Spelling
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.random_model import random_model
from gemma_convert.convert.readers import open_orbax
from gemma_convert.convert.registry import families
from gemma_convert.convert.relayout import Relaid, relayout
from gemma_convert.convert.tensor import Array, ArrayTensor, Box, blocks, slices, whole
from gemma_convert.convert.writers.orbax import write_orbax
from tests.checkpoints import (
    BF16,
    CONFIGS,
    F32,
    FORMS,
    GEMMA3,
    NATIVE,
    PREFIXES,
    arrays,
    assert_same_bits,
    base_arrays,
    memory,
    tunix_arrays,
)
from tests.strategies import boxes, configs

GEMMA4 = CONFIGS["gemma4"]["text_config"]
SHORT = Spelling(HF, "model.")
SPELLINGS = (SHORT, NATIVE, Spelling(DEEPMIND, "transformer/"))
DTYPES = st.sampled_from((BF16, F32))
REMEDY = "config.json and tensors belong to different models, or the checkpoint is incomplete"


def model_of(config: dict[str, Any]) -> Model:
    """The dimensions of ``config``."""
    return read_model(config, families())


def to_tunix(values: dict[str, Array], config: dict[str, Any]) -> Checkpoint:
    """Tensors under ``model.`` in Tunix's layout."""
    return relayout(memory(values, source="base"), model_of(config), SHORT, NATIVE)


def to_hf(values: dict[str, Array], config: dict[str, Any]) -> Checkpoint:
    """Tunix's tensors under ``model.`` in Hugging Face's layout."""
    return relayout(memory(values, source="run"), model_of(config), NATIVE, SHORT)


def refusal(values: dict[str, Array], config: dict[str, Any], spelling: Spelling) -> str:
    """The message with which tensors in ``spelling`` are refused."""
    other = NATIVE if spelling.layout is HF else SHORT
    with pytest.raises(LayoutError) as caught:
        relayout(memory(values, source="given"), model_of(config), spelling, other)
    return str(caught.value)


# Round trips


@pytest.mark.parametrize(("config", "prefix"), FORMS)
def test_hf_to_tunix_to_hf(config: dict[str, Any], prefix: str) -> None:
    """The two jobs as a user runs them; names come back under the prefix they had."""
    values = base_arrays(config, prefix)
    base = memory(values, config=config)
    tunix = arrays(hf_to_orbax(base).plan.target)
    assert_same_bits(arrays(orbax_to_hf(memory(tunix), base).plan.target), values)


@given(configs(), st.sampled_from(PREFIXES), DTYPES)
def test_hf_to_tunix_to_hf_whatever_the_sizes(
    config: dict[str, Any], prefix: str, dtype: np.dtype[Any]
) -> None:
    model, spelling = model_of(config), Spelling(HF, prefix)
    values = base_arrays(config, prefix, dtype)
    there = relayout(memory(values), model, spelling, NATIVE)
    assert_same_bits(arrays(relayout(there, model, NATIVE, spelling)), values)
    assert_same_bits(arrays(relayout(memory(arrays(there)), model, NATIVE, spelling)), values)


@given(configs(), DTYPES)
def test_tunix_to_hf_to_tunix_whatever_the_sizes(
    config: dict[str, Any], dtype: np.dtype[Any]
) -> None:
    values = tunix_arrays(config, dtype)
    assert_same_bits(arrays(to_tunix(arrays(to_hf(values, config)), config)), values)


@given(configs(), st.permutations(SPELLINGS), DTYPES)
def test_any_layout_to_any_other_and_back(
    config: dict[str, Any], spellings: list[Spelling], dtype: np.dtype[Any]
) -> None:
    """From one to the next, to the third, and back to the first: bit for bit."""
    model = model_of(config)
    values = arrays(random_model(config, spellings[0], dtype))
    there = arrays(relayout(memory(values), model, spellings[0], spellings[1]))
    back = arrays(relayout(memory(there), model, spellings[1], spellings[0]))
    assert_same_bits(back, values)
    third = arrays(relayout(memory(there), model, spellings[1], spellings[2]))
    assert_same_bits(third, arrays(relayout(memory(values), model, spellings[0], spellings[2])))
    assert_same_bits(arrays(relayout(memory(third), model, spellings[2], spellings[0])), values)


def test_another_prefix_is_another_name_for_the_same_bytes() -> None:
    values = base_arrays(GEMMA3, "model.")
    source = memory(values)
    found = relayout(source, model_of(GEMMA3), SHORT, Spelling(HF, PREFIXES[2]))
    for name, tensor in source.items():
        assert found[PREFIXES[2] + name.removeprefix("model.")] is tensor


# Boxes


@given(st.data(), configs(), st.booleans())
def test_a_box_is_that_part_of_the_whole(
    data: st.DataObject, config: dict[str, Any], tunix: bool
) -> None:
    """Across heads, across keys and values, in parts of heads: never more, never moved."""
    if tunix:
        made = to_tunix(base_arrays(config, "model.", F32), config)
    else:
        made = to_hf(tunix_arrays(config, F32), config)
    relaid = [name for name, tensor in made.items() if isinstance(tensor, Relaid)]
    tensor = made[data.draw(st.sampled_from(relaid))]
    box = data.draw(boxes(tensor.shape))
    found = tensor.read(box)
    assert found.dtype == tensor.dtype
    assert np.array_equal(found, tensor.numpy()[slices(box)])


@given(configs(), st.booleans(), st.integers(1, 300))
def test_blocks_one_after_the_other_are_the_tensor(
    config: dict[str, Any], tunix: bool, block_bytes: int
) -> None:
    """As a writer streams it."""
    if tunix:
        made = to_tunix(base_arrays(config, "model."), config)
    else:
        made = to_hf(tunix_arrays(config), config)
    tensor = next(tensor for tensor in made.values() if isinstance(tensor, Relaid))
    streamed = b"".join(tensor.read(box).tobytes() for box in blocks(tensor, block_bytes))
    assert streamed == tensor.numpy().tobytes()


class Unreadable(ArrayTensor):
    """A tensor that must not be read."""

    def read(self, box: Box) -> Array:
        raise AssertionError("read")


def test_keys_are_made_of_keys_alone() -> None:
    """Half of kv_einsum is read from k_proj alone, though the whole needs both."""
    values = base_arrays(GEMMA3, "model.")
    key, value = (f"model.layers.0.self_attn.{s}_proj.weight" for s in "kv")
    source = memory(values)
    source = source.replace(tensors={**source.tensors, value: Unreadable(values[value])})
    kv = relayout(source, model_of(GEMMA3), SHORT, NATIVE)["layers.0.attn.kv_einsum.w"]
    keys, both = ((0, 1), (0, 3), (0, 10), (0, 7)), whole(kv.shape)
    found = kv.read(keys)[0]
    assert np.array_equal(found, values[key].reshape(3, 7, 10).transpose(0, 2, 1))
    with pytest.raises(AssertionError, match=r"^read$"):
        kv.read(both)


def test_a_part_of_two_heads() -> None:
    """The stored rows of such a box are no whole heads: more is read, the right part returned."""
    values = base_arrays(GEMMA3, "model.")
    q = to_tunix(values, GEMMA3)["layers.0.attn.q_einsum.w"]
    stored = values["model.layers.0.self_attn.q_proj.weight"].reshape(6, 7, 10)
    found = q.read(((1, 3), (2, 4), (5, 6)))
    assert np.array_equal(found, stored[1:3, 5:6, 2:4].transpose(0, 2, 1))


# Parameters that nothing reads

SHARED = {**GEMMA4, "attention_k_eq_v": False, "num_kv_shared_layers": 2}
DEAD = {
    f"model.layers.{i}.self_attn.{name}.weight"
    for i in (1, 2)
    for name in ("k_proj", "v_proj", "k_norm")
}


@pytest.mark.parametrize("target", SPELLINGS[1:], ids=str)
def test_what_nothing_reads_may_be_absent_and_is_then_zero(target: Spelling) -> None:
    """As transformers 5 saves such a model; Tunix and DeepMind's library want the arrays."""
    values = base_arrays(SHARED, "model.")
    live = {name: array for name, array in values.items() if name not in DEAD}
    model = model_of(SHARED)
    whole_one = arrays(relayout(memory(values), model, SHORT, target))
    made = relayout(memory(live), model, SHORT, target)
    zero = {n for n, a in arrays(made).items() if not a.any()}
    assert {n: t.shape for n, t in made.items()} == {n: a.shape for n, a in whole_one.items()}
    assert {n: t.dtype for n, t in made.items()} == {n: a.dtype for n, a in whole_one.items()}
    assert len(zero) == 4
    assert all("kv_einsum" in name or "key_norm" in name for name in zero)
    assert_same_bits(
        {n: a for n, a in arrays(made).items() if n not in zero},
        {n: a for n, a in whole_one.items() if n not in zero},
    )
    (note,) = made.notes
    assert note.startswith("4 tensors that the model has but never reads are not in the source")
    assert next(name for name in made if name in zero) in note


def test_what_nothing_reads_is_carried_where_it_is() -> None:
    """On the Hub it is there: nothing is filled, nothing is lost."""
    values = base_arrays(SHARED, "model.")
    made = to_tunix(values, SHARED)
    assert made.notes == ()
    assert_same_bits(arrays(to_hf(arrays(made), SHARED)), values)


def test_hf_is_not_given_what_nothing_reads() -> None:
    live = {n: a for n, a in base_arrays(SHARED, "model.").items() if n not in DEAD}
    other = relayout(memory(live), model_of(SHARED), SHORT, Spelling(HF, PREFIXES[2]))
    assert len(other) == len(live)
    assert other.notes == ()


def test_half_of_what_nothing_reads_is_refused() -> None:
    values = base_arrays(SHARED, "model.")
    del values["model.layers.1.self_attn.v_proj.weight"]
    assert refusal(values, SHARED, SHORT) == (
        f"given: model.layers.1.self_attn.v_proj.weight: missing (kv of layer 1); {REMEDY}"
    )


def test_keys_and_values_that_are_read_must_be_there() -> None:
    values = base_arrays(SHARED, "model.")
    del values["model.layers.0.self_attn.k_norm.weight"]
    message = refusal(values, SHARED, SHORT)
    assert "model.layers.0.self_attn.k_norm.weight: missing (k_norm of layer 0)" in message


# Right values of known faults


@pytest.mark.parametrize("on_disk", [False, True])
def test_layer_i_stays_layer_i(on_disk: bool, tmp_path: Path) -> None:
    """Twelve layers whose keys are strings, in the order of strings: 0, 1, 10, 11, 2, ..."""
    config = {**GEMMA3, "num_hidden_layers": 12, "layer_types": ["full_attention"] * 12}
    values = {
        name: np.full(array.shape, int(name.split(".")[1]) if "layers." in name else 99, BF16)
        for name, array in sorted(tunix_arrays(config).items())
    }
    assert list(values)[2].startswith("layers.0.")
    source = memory(values)
    if on_disk:
        write_orbax(source, tmp_path)
        source = open_orbax(tmp_path)
    for name, tensor in relayout(source, model_of(config), NATIVE, SHORT).items():
        expected = int(name.split(".")[2]) if "layers." in name else 99
        assert (tensor.numpy() == expected).all(), name


def test_more_layers_than_config_says_are_refused() -> None:
    message = refusal(
        tunix_arrays(GEMMA3), {**GEMMA3, "num_hidden_layers": 1, "layer_types": None}, NATIVE
    )
    assert message == (
        "given: layers.1.attn.q_einsum.w: no parameter of a gemma3 of 1 layers in layout tunix "
        f"(and 11 more like it); {REMEDY}"
    )


def test_fewer_layers_than_config_says_are_refused() -> None:
    message = refusal(
        tunix_arrays(GEMMA3), {**GEMMA3, "num_hidden_layers": 3, "layer_types": None}, NATIVE
    )
    assert message == (
        f"given: layers.2.attn.q_einsum.w: missing (q of layer 2) (and 11 more like it); {REMEDY}"
    )


def test_no_value_is_invented_where_it_is_the_key() -> None:
    made = to_hf(tunix_arrays(GEMMA4), GEMMA4)
    assert made["model.layers.2.self_attn.k_proj.weight"].shape == (2 * 13, 10)
    assert [n for n in made if "v_proj" in n] == [
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
    ]


def test_a_value_that_config_denies_is_refused() -> None:
    """Not dropped, though the layer would work without it."""
    values = base_arrays(GEMMA4, "model.")
    name = "model.layers.2.self_attn.v_proj.weight"
    values[name] = values["model.layers.2.self_attn.k_proj.weight"]
    assert refusal(values, GEMMA4, SHORT) == (
        f"given: {name}: no parameter of a gemma4 of 3 layers in layout hf; {REMEDY}"
    )


def test_a_value_that_config_promises_is_missed() -> None:
    values = base_arrays(GEMMA4, "model.")
    config = {**GEMMA4, "attention_k_eq_v": False, "num_key_value_heads": 2}
    assert "model.layers.2.self_attn.v_proj.weight: missing (kv of layer 2)" in disagreements(
        memory(values), model_of(config), SHORT
    )


def test_layer_scalars_are_carried_bit_for_bit() -> None:
    """Values that bfloat16 cannot hold exactly, in the dtype they have, both ways."""
    scalars = [np.array([0.3], BF16), np.array([0.7], BF16), np.array([-0.0], BF16)]
    values = base_arrays(GEMMA4, "model.")
    values |= {f"model.layers.{i}.layer_scalar": scalar for i, scalar in enumerate(scalars)}
    tunix = arrays(to_tunix(values, GEMMA4))
    for i, scalar in enumerate(scalars):
        assert tunix[f"layers.{i}.skip_scale"].tobytes() == scalar.tobytes()
    assert_same_bits(arrays(to_hf(tunix, GEMMA4)), values)


@pytest.mark.parametrize(("config", "stored"), [(GEMMA3, 0.25), (GEMMA4, 1.25)])
def test_norms_are_the_same_in_both_layouts(config: dict[str, Any], stored: float) -> None:
    """Gemma 3 multiplies by 1 + w on both sides and Gemma 4 by w: nothing is added on the way."""
    values = {
        name: np.full_like(array, stored) if "norm" in name else array
        for name, array in base_arrays(config, "model.").items()
    }
    tunix = arrays(to_tunix(values, config))
    norms = {name: array for name, array in tunix.items() if name.endswith("norm.scale")}
    assert len(norms) == 1 + 6 * config["num_hidden_layers"]
    assert all((norm == stored).all() for norm in norms.values())
    assert_same_bits(arrays(to_hf(tunix, config)), values)


# Refusals


def test_a_shape_that_disagrees_is_told_with_axes_and_numbers() -> None:
    values = base_arrays(GEMMA3, "model.")
    name = "model.layers.1.self_attn.v_proj.weight"
    values[name] = values[name][:-1]
    assert refusal(values, GEMMA3, SHORT) == (
        f"given: {name}: expected (k h) d = (3 7) 10 by config.json, found shape [20, 10]; {REMEDY}"
    )


def test_the_same_size_in_another_shape_is_refused() -> None:
    values = tunix_arrays(GEMMA3)
    name = "layers.0.mlp.down_proj.kernel"
    values[name] = values[name].T
    assert f"{name}: expected f d = 11 10 by config.json, found shape [10, 11]" in refusal(
        values, GEMMA3, NATIVE
    )


def test_keys_and_values_of_different_dtypes_are_refused() -> None:
    values = base_arrays(GEMMA3, "model.")
    name = "model.layers.0.self_attn.v_proj.weight"
    values[name] = values[name].astype(np.float32)
    assert refusal(values, GEMMA3, SHORT) == (
        "given: kv of layer 0 has several dtypes: model.layers.0.self_attn.k_proj.weight bfloat16, "
        f"{name} float32; {REMEDY}"
    )


def test_a_part_may_be_absent_but_no_part_of_a_part() -> None:
    """Deltas of an adapter: whole parameters may lack, half of a fused one may not."""
    names = [f"model.layers.0.self_attn.{s}_proj.weight" for s in "kv"]
    values = {n: a for n, a in base_arrays(GEMMA3, "model.").items() if n in names}
    model = model_of(GEMMA3)
    made = relayout(memory(values), model, SHORT, NATIVE, partial=True)
    assert list(made) == ["layers.0.attn.kv_einsum.w"]
    del values[names[1]]
    with pytest.raises(LayoutError, match=r"v_proj\.weight: missing \(kv of layer 0\)"):
        relayout(memory(values), model, SHORT, NATIVE, partial=True)
