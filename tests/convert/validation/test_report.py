"""The HTML report: whole, self-contained, escaped, and drawn from the numbers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from gemma_convert.convert.validation import report
from gemma_convert.convert.validation.diff import diff
from gemma_convert.convert.validation.report import html, write_report
from gemma_convert.convert.validation.result import Finding, Result
from gemma_convert.convert.validation.svg import heat_map, line_chart
from tests.checkpoints import (
    ALPHA,
    GEMMA3,
    base_arrays,
    factor_arrays,
    memory,
    run_cli,
    write_base,
    write_run,
)
from tests.reports import results

VOID = {"meta", "link", "br"}


class Checked(HTMLParser):
    """Every tag closed in order; what a browser would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [v or "" for k, v in attributes if k in ("src", "href", "srcset", "data")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(text: str) -> Checked:
    parser = Checked()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert [load for load in parser.loads if not load.startswith("data:")] == []
    assert not re.search(r"@import|url\(|<script", text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)
    return parser


def test_every_check_has_its_section() -> None:
    parser = checked(html(results(), ["gemma-convert", "validate", "a b"]))
    text = " ".join(parser.text)
    for part in (
        "FAILED",
        "PASSED",
        "Relative difference by layer and module",
        "KL by position",
        "Top-1 by position",
        "Hidden states",
        "Survival of the delta",
        "Between 0.1 and 0.2 a tensor",
        "gemma-convert validate 'a b'",
        "safetensors",
        "model.layers.4.self_attn.k_proj.weight",
    ):
        assert part in text, part


def test_what_is_told_is_text_and_not_markup() -> None:
    text = html(results(), ["x"])
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_verdict_of_all() -> None:
    passed = Result("merged", "t", (), (), {"tensors": {}})
    failed = Result("merged", "t", (Finding("a", "b"),), (), {"tensors": {}})
    assert 'class="verdict passed"' in html([passed], [])
    assert 'class="verdict passed"' not in html([failed], [])
    first = re.search(r'class="verdict (\w+)"', html([passed, failed], []))
    assert first is not None
    assert first[1] == "failed"


def test_a_heat_map_is_darker_for_more() -> None:
    svg = heat_map({("q", 0): 0.0, ("q", 1): 1e-6, ("q", 2): 1.0, ("k", 2): None}, "title")
    fills = re.findall(r'fill="(#\w+)" stroke', svg)
    assert fills == ["#ffffff", "#dbeafe", "#172554", "#a1a1aa"]
    titles = re.findall(r"<title>(.*?)</title>", svg)
    assert titles == ["q, layer 0: 0", "q, layer 1: 1e-06", "q, layer 2: 1", "k, layer 2: unknown"]


def test_a_heat_map_has_a_colour_for_what_is_no_number() -> None:
    drawn = heat_map({("a", 0): 1.0, ("a", 1): float("inf"), ("a", 2): float("nan")}, "x")
    assert drawn.count("#be123c") == 2
    assert "darkest 1" in drawn


def test_lines_go_up_by_decades() -> None:
    svg = line_chart({"a": [(0, 1e-4), (10, 1e-2)], "b": [(5, 0.0)]}, "t", "x", "y")
    points = re.findall(r'polyline points="(.*?)"', svg)
    first, last = (tuple(map(float, p.split(","))) for p in points[0].split())
    assert first[0] < last[0]
    assert first[1] > last[1]  # y grows downwards
    assert points[1].split()[0].endswith(f"{first[1]:.1f}")  # zero stands on the floor


def test_nothing_to_draw() -> None:
    ElementTree.fromstring(line_chart({"a": [(0, 0.0)]}, "t", "x", "y"))
    ElementTree.fromstring(heat_map({("q", 0): 0.0}, "t"))


def test_the_commands_write_it(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    run = write_run(tmp_path / "run", factor_arrays(GEMMA3))
    out, report = tmp_path / "out", tmp_path / "reports" / "r.html"
    given = ["--base", base, "--alpha", ALPHA]
    assert run_cli("orbax-to-hf", run, "--out", out, *given, "--quiet") == 0
    for words in (
        ["diff", base, out],
        ["validate", "roundtrip", base],
        ["validate", "merged", out, "--adapter", run, *given],
    ):
        assert run_cli(*words, "--report", report, "--quiet") == 0
        assert "".join(map(str, words[:1])) in report.read_text()
        checked(report.read_text())


@pytest.mark.parametrize("count", [1, 5, 9])
def test_many_series_have_a_legend_each(count: int) -> None:
    svg = line_chart({f"name {i}": [(0, 1.0), (1, 2.0)] for i in range(count)}, "t", "x", "y")
    assert all(f"name {i}" in svg for i in range(count))


def test_write_report_replaces_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    path.write_text("old")
    write_report(path, [Result("merged", "t", (), (), {"tensors": {}})], ["x"])
    assert path.read_text().startswith("<!doctype html>")


def test_a_report_replaces_reports_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before anything is done, and nothing of the user's is lost."""
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    weights = next(base.glob("*.safetensors"))
    before = weights.read_bytes()
    (tmp_path / "d.html").mkdir()
    for path, said in (
        (weights, "does not end in .html"),
        (tmp_path / "d.html", "no file can be made there"),
        (weights / "r.html", "no file can be made there"),
    ):
        assert run_cli("diff", base, base, "--report", path) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert weights.read_bytes() == before


def test_a_path_that_is_no_text_can_be_reported(tmp_path: Path) -> None:
    """Bytes of a file name that are not UTF-8 are half characters in Python."""
    result = Result("diff", "caf\udce9 against x", (), ())
    write_report(tmp_path / "r.html", [result], ["gemma-convert", "caf\udce9"])
    assert r"caf\udce9" in (tmp_path / "r.html").read_text()


def test_what_was_found_is_told_where_the_report_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", "r.html")

    monkeypatch.setattr(report, "write_report", full)
    base = write_base(tmp_path / "base", GEMMA3, base_arrays(GEMMA3, "model."))
    assert run_cli("validate", "roundtrip", base, "--report", tmp_path / "r.html") == 1
    told = capsys.readouterr()
    assert "PASSED" in told.out
    assert "report:" not in told.out
    assert "No space left on device" in told.err


def test_a_tensor_that_is_not_finite_stands_out() -> None:
    """Its norms leave those values out: it would be white, as if nothing had changed."""
    name = "model.layers.1.self_attn.q_proj.weight"
    right = base_arrays(GEMMA3, "model.")
    wrong = {**right, name: np.full_like(right[name], np.nan)}
    page = html([diff(memory(right), memory(wrong))], [])
    assert (
        '#be123c" stroke="#d4d4d8" stroke-width="0.5"><title>self_attn.q_proj, layer 1: inf' in page
    )
    assert "layer; white is 0, red not finite" in page
    assert f'{name}</td><td class="short">differs</td><td class="short">inf</td>' in page
    assert page.count("not_finite") == 1  # of the modules, whose norms leave them out
    assert "layer; white is 0<" in html([diff(memory(right), memory(right))], [])


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_in_one_place_the_worst_is_shown(order: int) -> None:
    rows = [
        {"name": f"layers.0.x.{leaf}", "e": e} for leaf, e in (("w", 1.0), ("weight", float("nan")))
    ]
    names = [row["name"] for row in rows][::order]
    shown = [{**row, "name": name} for row, name in zip(rows, names, strict=True)]
    assert "x, layer 0: nan" in report._by_place(shown, "e", "x")
