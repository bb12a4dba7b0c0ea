"""Rows of the embedding that one layout has and another has not: dropped, restored, invented."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import LayoutError
from gemma_convert.convert.job import Job
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import DEEPMIND, HF, TUNIX, Layout
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapters.open import adapter_source
from tests.checkpoints import BF16, F32, GEMMA3, arrays, assert_same_bits, base_arrays, memory
from tests.peft_files import in_memory

SMALL = {**GEMMA3, "hidden_size": 5, "num_hidden_layers": 1, "layer_types": None}
MULTIMODAL: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {**SMALL, "vocab_size": 262208},
    "tie_word_embeddings": True,
}
GEMMA2 = {**SMALL, "model_type": "gemma2", "vocab_size": 256000}
PREFIX = "language_model.model."
EMBEDDING = {
    "hf": "embed_tokens.weight",
    "tunix": "embedder.input_embedding",
    "deepmind": "transformer/embedder/input_embedding",
}


def multimodal(last: float | None = None) -> Checkpoint:
    """A Gemma 3 of 262208 rows in bfloat16; the 64 last ones all ``last``, or random."""
    values = base_arrays(MULTIMODAL, PREFIX)
    if last is not None:
        values[PREFIX + EMBEDDING["hf"]][262144:] = last
    return memory(values, config=MULTIMODAL, source="base")


def gemma2() -> Checkpoint:
    """A Gemma 2 of 256000 rows."""
    return memory(base_arrays(GEMMA2, "model."), config=GEMMA2, source="base")


def tree_of(job: Job) -> Checkpoint:
    """What ``job`` makes, as a checkpoint of its own without config."""
    return memory(arrays(job.plan.target), source="run", format="orbax")


def embedding(job: Job) -> Array:
    """The embedding that ``job`` makes."""
    name = next(n for n in job.plan.target if n.endswith(EMBEDDING[job.layout.name]))
    return job.plan.target[name].numpy()


@pytest.mark.parametrize("layout", [TUNIX, DEEPMIND], ids=lambda layout: layout.name)
def test_dropped_rows_come_back_from_the_base(layout: Layout) -> None:
    """262208 to 262144 and back, bit for bit; the base's other weights are not used."""
    source = multimodal()
    there = convert(source, layout)
    stored = source[PREFIX + EMBEDDING["hf"]].numpy()
    assert embedding(there).tobytes() == stored[:262144].tobytes()
    largest = np.abs(stored[262144:].astype(np.float32)).max()
    assert there.plan.target.notes == (
        f"{EMBEDDING[layout.name]}: dropped rows 262144 to 262207, "
        f"which no token uses (largest value {largest:.3g})",
    )
    back = convert(tree_of(there), HF, base=source)
    assert_same_bits(arrays(back.plan.target), arrays(source))
    assert back.plan.target.notes == (
        f"{PREFIX}embed_tokens.weight: rows 262144 to 262207 are taken from the base; "
        "no token uses them",
    )


def test_rows_without_a_base_are_zero_and_said() -> None:
    source = multimodal()
    tree = tree_of(convert(source, TUNIX))
    job = convert(tree, HF, base=source.replace(tensors={}))
    stored = source[PREFIX + EMBEDDING["hf"]].numpy()
    found = embedding(job)
    assert found.shape == (262208, 5)
    assert found.dtype == BF16
    assert found[:262144].tobytes() == stored[:262144].tobytes()
    assert not found[262144:].any()
    assert job.plan.target.notes == (
        f"{PREFIX}embed_tokens.weight: rows 262144 to 262207 are invented: all zero; "
        "no token uses them",
    )
    assert job.plan.actions[PREFIX + EMBEDDING["hf"]] == "filled"


def test_rows_across_the_border_are_read_in_one() -> None:
    source = multimodal()
    target = convert(tree_of(convert(source, TUNIX)), HF, base=source).plan.target
    name = PREFIX + EMBEDDING["hf"]
    for rows in ((262140, 262150), (262143, 262144), (262144, 262145), (262207, 262208), (0, 3)):
        box = (rows, (1, 4))
        assert target[name].read(box).tobytes() == source[name].read(box).tobytes()


def test_dropped_zeros_are_called_zeros() -> None:
    (note,) = convert(multimodal(0.0), TUNIX).plan.target.notes
    assert note.endswith("dropped rows 262144 to 262207, all zero")
    (note,) = convert(multimodal(-3.0), TUNIX).plan.target.notes
    assert note.endswith("which no token uses (largest value 3)")


@pytest.mark.parametrize("layout", [TUNIX, DEEPMIND], ids=lambda layout: layout.name)
def test_padding_of_the_old_vocabulary(layout: Layout) -> None:
    """256000 to 256128 and back."""
    source = gemma2()
    there = convert(source, layout)
    found = embedding(there)
    assert found.shape == (256128, 5)
    assert found[:256000].tobytes() == source["model.embed_tokens.weight"].numpy().tobytes()
    assert not found[256000:].any()
    assert there.plan.target.notes == (
        f"{EMBEDDING[layout.name]}: rows 256000 to 256127 are invented: all zero; "
        "no token uses them",
    )
    back = convert(tree_of(there), HF, base=source.replace(tensors={}))
    assert_same_bits(arrays(back.plan.target), arrays(source))
    (note,) = back.plan.target.notes
    assert note == "model.embed_tokens.weight: dropped rows 256000 to 256127, all zero"


def test_between_the_jax_layouts_nothing_is_dropped() -> None:
    """Padding that is not zero is carried."""
    values = arrays(tree_of(convert(gemma2(), TUNIX)))
    values["embedder.input_embedding"][256000:] = 1.5
    tree = memory(values, source="run", format="orbax")
    job = convert(tree, DEEPMIND, base=gemma2().replace(tensors={}))
    assert (embedding(job)[256000:] == 1.5).all()
    assert job.plan.target.notes == ()
    (note,) = convert(tree, HF, base=gemma2().replace(tensors={})).plan.target.notes
    assert note.endswith("which no token uses (largest value 1.5)")


def test_any_other_number_of_rows_is_refused() -> None:
    values = arrays(multimodal())
    values[PREFIX + EMBEDDING["hf"]] = values[PREFIX + EMBEDDING["hf"]][:262143]
    source = memory(values, config=MULTIMODAL, source="base")
    with pytest.raises(LayoutError, match=r"expected v d = 262208 5 by config.json, found shape"):
        convert(source, TUNIX)


@pytest.mark.parametrize("layout", [HF, TUNIX], ids=lambda layout: layout.name)
def test_an_adapter_of_the_embedding_changes_the_rows_that_it_has(layout: Layout) -> None:
    """256000 rows of Hugging Face's, in an embedding of 256128 rows too."""
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 256000)).astype("f4"), rng.normal(size=(5, 2)).astype("f4")
    stem = "base_model.model.model.embed_tokens.lora_embedding_"
    adapter = in_memory(
        {f"{stem}A": a, f"{stem}B": b},
        r=2,
        lora_alpha=3,
        ensure_weight_tying=True,
        peft_version="0.19.0",
    )
    base = memory(base_arrays(GEMMA2, "model.", F32), config=GEMMA2, source="base")
    made = embedding(convert(base, layout, adapters=[adapter_source(adapter)]))
    expected = base["model.embed_tokens.weight"].numpy() + np.float32(1.5) * (b @ a).T
    np.testing.assert_allclose(made[:256000], expected, rtol=0, atol=1e-6)  # the order of sums
    assert made.shape == ({HF: 256000, TUNIX: 256128}[layout], 5)
    assert not made[256000:].any()
