"""MaxText's adapters resized and combined, against numpy in MaxText's own axes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.errors import AdapterError
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, MAXTEXT, MAXTEXT_UNSCANNED, Layout
from gemma_convert.convert.model import Model, read_model
from gemma_convert.convert.registry import families
from gemma_convert.convert.tensor import Array
from gemma_convert.surgery.adapters.open import adapter_source
from gemma_convert.surgery.combine_lora import Recipe, combine_lora
from gemma_convert.surgery.exchange import Exchange, to_peft
from gemma_convert.surgery.quantise import Scheme
from gemma_convert.surgery.resize_lora import resize_lora
from tests.checkpoints import arrays, memory, run_cli
from tests.convert.test_maxtext import CASES, LEAD, hf, regular
from tests.maxtext_lora import ALPHA, Style, lora
from tests.surgery.test_maxtext_lora import CONFIG, law, merged, on_disk, run

KINDS: list[tuple[str, Layout, Style]] = [
    ("gemma2", MAXTEXT, "native"),  # whose queries have a scale of their own
    ("gemma3", MAXTEXT, "qwix-1"),
    ("gemma3", MAXTEXT_UNSCANNED, "qwix-0"),
]


def model_of(kind: str) -> tuple[Model, dict[str, Any]]:
    config = regular(kind, CASES[kind])
    return read_model(config, families()), config


def reopened(made: Exchange, *, is_peft: bool) -> Checkpoint:
    """What was written, as it is opened again."""
    key = "adapter_config" if is_peft else "custom_metadata"
    return memory(arrays(made.job.plan.target), source="made", metadata={key: made.beside})


def assert_merges(
    kind: str, layout: Layout, made: Exchange, is_peft: bool, deltas: Mapping[str, Array]
) -> None:
    before = law(kind, layout)
    after = law(kind, layout, merged(kind, reopened(made, is_peft=is_peft), None))
    assert deltas
    for name, kernel in before.items():
        expected = kernel.astype(np.float64) + deltas.get(name, 0)
        # float32: factors, a sum of at most 16 products, a factor there and back for queries
        bound = 2e-6 * np.abs(expected).max()
        np.testing.assert_allclose(after[name], expected, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("is_peft", [False, True], ids=["tunix", "peft"])
@pytest.mark.parametrize(("kind", "layout", "style"), KINDS)
def test_more_rank_adds_what_maxtext_adds(
    kind: str, layout: Layout, style: Style, is_peft: bool
) -> None:
    made = lora(law(kind, layout), style, lead=LEAD)
    model, config = model_of(kind)
    source = adapter_source(run(made))
    wide = resize_lora(source, rank=9, to_peft=is_peft, model=model, config=config, alpha=ALPHA)
    assert wide.adapter.ranks == [9]
    assert_merges(kind, layout, wide, is_peft, made.deltas)


@pytest.mark.parametrize("is_peft", [False, True], ids=["tunix", "peft"])
@pytest.mark.parametrize(("kind", "layout", "style"), KINDS)
def test_a_sum_adds_both(kind: str, layout: Layout, style: Style, is_peft: bool) -> None:
    one, other = (lora(law(kind, layout), style, seed, LEAD) for seed in (3, 4))
    model, config = model_of(kind)
    sources = [adapter_source(run(one), 0.7), adapter_source(run(other), -1.5)]
    made = combine_lora(
        sources, Recipe("cat"), to_peft=is_peft, model=model, config=config, alpha=ALPHA
    )
    deltas = {name: 0.7 * delta - 1.5 * other.deltas[name] for name, delta in one.deltas.items()}
    assert_merges(kind, layout, made, is_peft, deltas)


def test_the_base_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, adapter = on_disk(tmp_path, CONFIG)
    words = ["surgery", "resize-lora", adapter, "--rank", 5, "--out", tmp_path / "out"]
    assert run_cli(*words) == 1
    assert "a MaxText LoRA, to be written as Qwix's; give the base's directory with --base" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_the_same_adapter_of_more_rank_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = on_disk(tmp_path, CONFIG)
    words = ["surgery", "resize-lora", adapter, "--rank", 7, "--base", base, "--quiet"]
    assert run_cli(*words, "--out", tmp_path / "wide") == 0
    words = ["surgery", "merge-lora", base, adapter, tmp_path / "wide", "--out", tmp_path / "out"]
    assert run_cli(*words) == 1
    assert "holds the same factors; leave it out" in capsys.readouterr().err


def test_a_quantised_base_is_noted() -> None:
    """Its codes are of MaxText's axes: nothing of Tunix's or PEFT's may claim to have them."""
    made = lora(law("gemma3", MAXTEXT), "qwix-1", lead=LEAD)
    said = {"lora": {"alpha": ALPHA, "weight_qtype": "nf4", "tile_size": 2}}
    checkpoint = run(made, metadata={"custom_metadata": said})
    job = convert(hf("gemma3"), HF, adapters=[adapter_source(checkpoint)])
    note = "training quantised the base to nf4, tile 2; this merges onto full precision"
    assert any(note in one for one in job.plan.target.notes)
    expected = merged("gemma3", run(made))
    found = arrays(job.plan.target)
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())
    model, config = model_of("gemma3")
    source = adapter_source(checkpoint)
    for exchange in (
        resize_lora(source, rank=9, model=model, config=config),
        to_peft(source, model, config),
    ):
        assert "trained_on" not in exchange.job.details  # nor do float32 factors tell a dtype
        notes = [note for note in exchange.job.plan.target.notes if "in MaxText's axes" in note]
        assert len(notes) == 1
    with pytest.raises(AdapterError, match="none of the adapters is one of Qwix in Tunix"):
        convert(
            hf("gemma3"),
            HF,
            adapters=[adapter_source(checkpoint)],
            base_quantization=Scheme("nf4", 2),
        )
