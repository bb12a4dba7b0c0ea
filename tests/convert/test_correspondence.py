"""The written-out tables: made from the rows, so that the documentation cannot drift."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma_convert.convert.correspondence import (
    AXES,
    TOWER_AXES,
    markdown,
    model_rows,
    stacks,
    table,
    towers,
)
from gemma_convert.convert.registry import families, named_model
from tests.checkpoints import run_cli

DOCUMENT = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_the_document_is_what_the_rows_say() -> None:
    assert DOCUMENT.read_text() == markdown(), (
        "run gemma-convert layouts --markdown > docs/layouts.md"
    )


def test_a_table_tells_which_layers_have_a_parameter() -> None:
    layers = {p.row.name: where for p, where in model_rows(named_model("gemma-4-e2b"))}
    assert layers["kv"] == "all"
    assert layers["embedding"] == ""
    layers = {p.row.name: where for p, where in model_rows(named_model("gemma-4-12b"))}
    assert layers["k"] == "5, 11, 17, 23, 29, 35, 41, 47"
    assert layers["kv"].startswith("0-4, 6-10, ")


def test_a_table_has_a_column_a_layout() -> None:
    header, lines = table(named_model("gemma-3-1b"))
    assert header[2:] == ["hf", "tunix", "deepmind", "maxtext"]
    kv = next(line for line in lines if line[0] == "kv")
    assert kv[2] == "layers.{i}.self_attn.{s:k_proj,v_proj}.weight: (k h) d"
    assert kv[3] == "layers.{i}.attn.kv_einsum.w: s k d h"


def test_every_axis_has_a_meaning() -> None:
    rows = [row for family in families().values() for row in family.rows]
    axes = {axis for row in rows for cell in row.cells.values() for axis in cell.axes}
    assert axes <= AXES.keys()
    rows = [r for family in families().values() for tower in family.towers for r in tower.rows]
    axes = {axis for row in rows for cell in row.cells.values() for axis in cell.axes}
    assert axes <= AXES.keys() | TOWER_AXES.keys()
    assert not AXES.keys() & TOWER_AXES.keys()


def test_the_towers_have_tables_of_their_own() -> None:
    assert list(towers(named_model("gemma-4-e2b"))) == [
        "vision tower, gemma4_vision",
        "audio tower, gemma4_audio",
    ]
    assert not towers(named_model("gemma-4-12b"))
    header, lines = table(towers(named_model("gemma-4-e2b"))["vision tower, gemma4_vision"])
    assert header[2:] == ["hf", "tunix-head", "deepmind"]  # MaxText's does not clip
    bounds = next(line for line in lines if line[0] == "kv_bounds")
    assert bounds[2].startswith("vision_tower.encoder.layers.{i}.self_attn.{s:k_proj,v_proj}.{b:")
    assert bounds[4].startswith("vision_encoder/transformer/layer_{i}/attn/kv_einsum/{b:clip_")


def test_a_layout_that_keeps_each_layer_by_itself_stacks_at_no_axis() -> None:
    """Gemma 2 in MaxText's unscanned layout has names of blocks, and no axis of them."""
    told = stacks(named_model("gemma-2-2b"))
    assert told[1:] == [
        "maxtext, stacked at axis 1: `decoder/layers/{head}_{j}/{tail}` (b).",
        "maxtext-unscanned, not stacked, in blocks: `decoder/layers_{b}/{head}_{j}/{tail}`.",
    ]


def test_markdown_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("layouts", "--markdown", "--model", "google/gemma-3-4b-it") == 0
    told = capsys.readouterr().out
    titles = [line for line in told.splitlines() if line.startswith("#")]
    assert titles == [
        "## google/gemma-3-4b-it",
        "## google/gemma-3-4b-it: vision tower, siglip",
    ]
    assert told.count("| parameter | layers | hf |") == 2
    assert "gemma-2" not in told


@pytest.mark.parametrize("options", [[], ["--markdown"], ["--model", "gemma-3-1b"]])
def test_quiet_prints_nothing(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("layouts", *options, "--quiet") == 0
    assert capsys.readouterr() == ("", "")
    assert run_cli("layouts", "--model", "gemma-9", "--quiet") == 1
    assert "no public model 'gemma-9' is known" in capsys.readouterr().err
    assert run_cli("layouts", "--markdown", "--json") == 2
