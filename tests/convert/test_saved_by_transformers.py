"""Directories as transformers saves them from each class, through files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma_convert.convert.checkpoint import Checkpoint
from gemma_convert.convert.jobs import convert
from gemma_convert.convert.layouts import HF, LAYOUTS, TUNIX
from gemma_convert.convert.readers import open_base, open_checkpoint
from gemma_convert.convert.writers.orbax import write_orbax
from gemma_convert.convert.writers.orbax_tree import FORMS
from tests import tiny
from tests.checkpoints import arrays, assert_same_bits


@pytest.mark.parametrize("case", ["gemma1-mqa", "gemma2", "gemma3", "gemma4"])
def test_classes_without_a_head(case: str, tmp_path: Path) -> None:
    """Their names have no prefix; what comes out is of the class with a head, and so are names."""
    model = tiny.hf_model(case)
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "headless")
    whole, headless = (open_base(tmp_path / name) for name in ("whole", "headless"))
    assert not any(name.startswith("model.") for name in headless)
    for layout in (TUNIX, HF):
        made, expected = (convert(one, layout).plan.target for one in (headless, whole))
        assert_same_bits(arrays(made), arrays(expected))
    made = convert(headless, HF).plan.target
    assert made.config["architectures"] == whole.config["architectures"]
    assert any("architectures is" in note for note in made.notes)


@pytest.mark.parametrize("to", ["maxtext-unscanned", "tunix"])
def test_keys_that_nothing_reads_of_a_tree_on_a_disk(to: str, tmp_path: Path) -> None:
    """DeepMind's names have '/' in the table and '.' before the last key on a disk."""
    tiny.hf_model("gemma4-e2b").save_pretrained(tmp_path / "base")
    base = open_base(tmp_path / "base")
    tree = convert(base, LAYOUTS["deepmind"]).plan.target
    write_orbax(tree, tmp_path / "tree", form=FORMS["deepmind"])
    made = convert(open_checkpoint(tmp_path / "tree"), LAYOUTS[to], base=base).plan.target
    expected: Checkpoint = convert(base, LAYOUTS[to]).plan.target
    assert_same_bits(arrays(made), arrays(expected))
    dead = {name for name in tree if "layer_3" in name and "key_norm" in name}
    lost = {name for name, reason in made.dropped.items() if "never reads" in reason}
    assert (len(dead), bool(lost)) == (1, to == "maxtext-unscanned")
