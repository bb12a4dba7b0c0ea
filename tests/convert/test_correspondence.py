"""The written-out tables: made from the rows, so that the documentation cannot drift."""

from __future__ import annotations

from pathlib import Path

from gemma_convert.convert.correspondence import (
    AXES,
    TOWER_AXES,
    markdown,
    model_rows,
    table,
    towers,
)
from gemma_convert.convert.registry import families, named_model

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
