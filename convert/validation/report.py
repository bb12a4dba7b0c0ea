"""The report: one HTML file that needs no network, for a screen, a phone and paper."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from math import inf, isnan
from pathlib import Path
from typing import Any

from gemma_convert import __version__
from gemma_convert.convert.ledger import versions
from gemma_convert.convert.validation.place import place
from gemma_convert.convert.validation.result import Result
from gemma_convert.convert.validation.svg import heat_map, line_chart

MOST_ROWS = 40
"""Rows of a table of tensors."""

MOST_FINDINGS = 200

_NORM = "relative_frobenius"

_SHORT = 40
"""Characters of a cell that is not broken into lines."""

Section = Callable[[Mapping[str, Any]], list[str]]


def write_report(path: Path, results: Sequence[Result], command: Sequence[str]) -> None:
    """Write the report of ``results`` to ``path``; an existing report is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # a path may hold bytes that are no text
    path.write_text(html(results, command), encoding="utf-8", errors="backslashreplace")


def html(results: Sequence[Result], command: Sequence[str]) -> str:
    """The report as text.

    Args:
        results: Outcomes of the checks that were run.
        command: The command line that ran them.
    """
    judged = [result for result in results if result.check != "diff"]
    body = [f"<h1>{escape(_headline(results))}</h1>"]
    if judged:
        passed = all(result.passed for result in judged)
        body.append(_verdict(passed, ", ".join(result.check for result in judged)))
    for result in results:
        body += _section(result)
    body += _provenance(results, command)
    return _PAGE.format(title=escape(_headline(results)), style=_STYLE, body="\n".join(body))


def _headline(results: Sequence[Result]) -> str:
    return "gemma-convert: " + ", ".join(result.check for result in results)


def _verdict(passed: bool, what: str) -> str:
    kind, word = ("passed", "PASSED") if passed else ("failed", "FAILED")
    return f'<p class="verdict {kind}">{word}<span>{escape(what)}</span></p>'


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _section(result: Result) -> list[str]:
    parts = [f"<section><h2>{escape(result.check)}</h2>", f"<p>{escape(result.title)}</p>"]
    if result.check != "diff":
        parts.append(_verdict(result.passed, _count(len(result.findings), "finding")))
    parts.append(_table((), result.summary))
    parts += [f'<p class="note">{escape(note)}</p>' for note in result.notes]
    parts += _findings(result)
    parts += _SECTIONS[result.check](result.data) if result.data else []
    return [*parts, "</section>"]


def _findings(result: Result) -> list[str]:
    if not result.findings or result.check == "diff":
        return []
    rows = [(finding.where, finding.what) for finding in result.findings[:MOST_FINDINGS]]
    parts = ["<h3>What is wrong</h3>", _table(("where", "what"), rows)]
    if len(result.findings) > MOST_FINDINGS:
        parts.append(f"<p>and {len(result.findings) - MOST_FINDINGS} more</p>")
    return parts


def _diff(data: Mapping[str, Any]) -> list[str]:
    parts = ["<h3>Relative difference by layer and module</h3>"]
    # a norm leaves out what is not finite, which is worse than any difference
    beyond = {"max_abs": inf, _NORM: inf}
    tensors = [{**row, **beyond} if row["not_finite"] else row for row in data["tensors"]]
    parts.append(_by_place(tensors, _NORM, "relative Frobenius norm"))
    if data["config"]:
        rows = [(key, _shown(a), _shown(b)) for key, (a, b) in data["config"].items()]
        parts += ["<h3>config.json</h3>", _table(("key", "A", "B"), rows)]
    modules = ("group", "tensors", "unequal", "not_finite", "max_abs", _NORM, "cosine")
    parts += ["<h3>By module</h3>", _columns(modules, data["modules"])]
    different = [row for row in tensors if row["status"] != "same"][:MOST_ROWS]
    if different:
        columns = ("name", "status", "max_abs", _NORM, "cosine", "looks_like")
        parts += ["<h3>What differs most</h3>", _columns(columns, different)]
    return parts


def _columns(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    return _table(columns, [tuple(_shown(row.get(c)) for c in columns) for row in rows])


def _roundtrip(data: Mapping[str, Any]) -> list[str]:
    inexact = [row for row in data["tensors"] if not row["exact"]]
    if not inexact:
        return []
    columns = ("name", "via", "unequal", "max_abs", "relative_frobenius")
    return ["<h3>Not exact</h3>", _columns(columns, inexact[:MOST_ROWS])]


def _merged(data: Mapping[str, Any]) -> list[str]:
    listed = [{"name": name, **row} for name, row in data["tensors"].items()]
    lost = [row["relative_error"] for row in listed]
    text = (
        "How much of the LoRA delta the rounding to the stored dtype lost: the relative error of "
        "the realised change, 0 if all of it survived, 1 if it is as bad as no change."
    )
    parts = ["<h3>Survival of the delta</h3>", f"<p>{text}</p>"]
    if lost:
        parts.append(f"<p>Between {min(lost):.3g} and {max(lost):.3g} a tensor.</p>")
    parts.append(_by_place(listed, "relative_error", "relative error of the realised change"))
    return parts


def _logits(data: Mapping[str, Any]) -> list[str]:
    prompts = data["prompts"]
    columns = {
        "prompt": "prompt",
        "tokens": "tokens",
        "compared": "compared",
        "max_abs": "largest difference",
        "mean_abs": "mean difference",
        "mean_kl": "mean KL(A||B)",
        "top1_agreement": "top-1 agreement",
        "worst_rank": "worst rank",
        "perplexity_a": "perplexity A",
        "perplexity_b": "perplexity B",
    }
    rows = [tuple(_shown(prompt[key]) for key in columns) for prompt in prompts]
    parts = ["<h3>By prompt</h3>", _table(tuple(columns.values()), rows)]
    parts += ["<h3>KL by position</h3>", _by_position(prompts, "kl", "KL(A||B), nats")]
    parts += ["<h3>Top-1 by position</h3>", _top1(prompts)]
    layers = {
        prompt["prompt"]: list(enumerate(prompt["layers"]))
        for prompt in prompts
        if prompt["layers"]
    }
    if layers:
        parts += [
            "<h3>Hidden states</h3>",
            _picture(
                line_chart(
                    layers,
                    "relative error of hidden states by layer",
                    "0 enters the first layer, i leaves layer i - 1",
                    "relative error",
                )
            ),
        ]
    return parts


def _by_position(prompts: Sequence[Mapping[str, Any]], key: str, label: str) -> str:
    series = {
        prompt["prompt"]: list(
            zip(prompt["by_position"]["position"], prompt["by_position"][key], strict=True)
        )
        for prompt in prompts
    }
    return _picture(line_chart(series, f"{label} by position", "position", label))


def _top1(prompts: Sequence[Mapping[str, Any]]) -> str:
    """Where the favourites differ, with the rank of A's in B."""
    rows = []
    for prompt in prompts:
        by = prompt["by_position"]
        places = [
            f"{position} ({f'rank {rank}' if rank > 1 else 'a tie'})"
            for position, same, rank in zip(by["position"], by["top1"], by["rank"], strict=True)
            if not same
        ]
        more = f" and {len(places) - 24} more" if len(places) > 24 else ""
        rows.append((prompt["prompt"], ", ".join(places[:24]) + more or "all equal"))
    return _table(("prompt", "positions at which B prefers another token"), rows)


_SECTIONS: Mapping[str, Section] = {
    "diff": _diff,
    "roundtrip": _roundtrip,
    "merged": _merged,
    "logits": _logits,
}


def _by_place(rows: Sequence[Mapping[str, Any]], key: str, label: str) -> str:
    """A heat map of the rows that stand in layers; of several in one place the largest."""
    values: dict[tuple[str, int], float | None] = {}
    for row in sorted(rows, key=lambda row: str(row["name"])):
        module, layer = place(row["name"])
        if layer is not None and key in row:
            old, new = values.get((module, layer)), row[key]
            values[module, layer] = new if old is None or new is None else _larger(old, new)
    return _picture(heat_map(values, f"{label} by layer and module")) if values else ""


def _larger(one: float, other: float) -> float:
    """The larger of two, NaN before all."""
    return one if isnan(one) or one > other else other


def _picture(svg: str) -> str:
    return f'<div class="wide">{svg}</div>'


def _provenance(results: Sequence[Result], command: Sequence[str]) -> list[str]:
    digests = {
        f"{side}: {name}": digest
        for result in results
        for side, files in result.data.get("fingerprints", {}).items()
        for name, digest in files.items()
    }
    made = [
        ("command", shlex.join(command)),
        ("made", datetime.now(UTC).isoformat(timespec="seconds")),
        ("gemma-convert", __version__),
        *versions().items(),
    ]
    parts = ["<section><h2>How this was made</h2>", _table((), made)]
    if digests:
        parts += ["<h3>Digests</h3>", _table(("input", "digest"), list(digests.items()))]
    return [*parts, "</section>"]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = "".join("<tr>" + "".join(_cell(str(cell)) for cell in row) + "</tr>" for row in rows)
    thead = f"<thead><tr>{head}</tr></thead>" if header else ""
    kind = "" if header else ' class="pairs"'
    return f'<div class="wide"><table{kind}>{thead}<tbody>{lines}</tbody></table></div>'


def _cell(text: str) -> str:
    kind = ' class="short"' if len(text) <= _SHORT else ""
    return f"<td{kind}>{escape(text)}</td>"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_STYLE = """
:root{color-scheme:light}
body{font:16px/1.5 system-ui,sans-serif;color:#18181b;background:#fff;margin:0 auto;
padding:1rem;max-width:60rem}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.25rem;border-bottom:1px solid #d4d4d8}
h3{font-size:1rem;margin:1.2rem 0 .3rem}
p{overflow-wrap:anywhere;margin:.4rem 0}
.verdict{font-weight:700;padding:.5rem .8rem;border-radius:.4rem;border:2px solid}
.verdict span{font-weight:400;margin-left:.8rem}
.passed{color:#14532d;background:#dcfce7;border-color:#15803d}
.failed{color:#7f1d1d;background:#fee2e2;border-color:#b91c1c}
.note{color:#3f3f46;border-left:3px solid #a1a1aa;padding-left:.6rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;margin:.3rem 0}
th,td{text-align:left;vertical-align:top;padding:.2rem .6rem;border-bottom:1px solid #e4e4e7}
td{overflow-wrap:anywhere;min-width:14rem;max-width:36rem;font-variant-numeric:tabular-nums}
td.short{white-space:nowrap;min-width:0}
.pairs td{min-width:0}.pairs td:first-child{font-weight:600;white-space:nowrap}
svg{display:block;width:100%;height:auto}
@media print{body{max-width:none;padding:0;font-size:11pt}.wide{overflow:visible}
section{break-inside:auto}svg,tr{break-inside:avoid}h2,h3{break-after:avoid}
.verdict{print-color-adjust:exact;-webkit-print-color-adjust:exact}
svg{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
""".strip()

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
