"""Plans and ledgers as tables on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from gemma_convert.console import print_json, size_text
from gemma_convert.convert.job import Job
from gemma_convert.convert.ledger import tensor_entries
from gemma_convert.convert.printable import counted, one_line


def show_notes(job: Job) -> None:
    """Print what a user should know about how the inputs were opened."""
    told = (*job.plan.sources, job.plan.target)
    for note in dict.fromkeys(note for checkpoint in told for note in checkpoint.notes):
        click.echo(f"note: {one_line(note)}", err=True)


def plan_json(job: Job) -> dict[str, Any]:
    """A plan for machines."""
    plan = job.plan
    model = job.model
    return {
        **({"model": {"family": model.family.name, "name": model.name}} if model else {}),
        **job.details,
        "inputs": [source.source for source in plan.sources],
        "counts": plan.counts,
        "dropped": dict(plan.dropped),
        "bytes": plan.target.nbytes,
        "pairs": sum(len(adapter.pairs) for adapter in job.adapters),
        "tensors": tensor_entries(plan),
    }


def show_plan(job: Job, *, as_json: bool) -> None:
    """Print what would be done."""
    if as_json:
        print_json(plan_json(job))
        return
    plan = job.plan
    rows = [("model", _model(plan_json(job)["model"], len(job.model.layers)))] if job.model else []
    rows += _layouts(job.details)
    rows += [(action, counted(count, "tensor")) for action, count in plan.counts.items() if count]
    if job.bases is not None:
        rows.append(("base", job.bases[0]))
    for adapter in job.adapters:
        scales = _span(sorted(set(adapter.scales.values())))
        rows.append((adapter.kind, f"{len(adapter.pairs)} pairs, scale {scales}"))
    rows += job.summary
    rows.append(("to write", size_text(plan.target.nbytes)))
    _table("Plan: nothing was written", rows)
    _show_dropped(plan.dropped)


def show_ledger(ledger: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what was done."""
    _warn_of_losses(ledger)
    if as_json:
        print_json(ledger)
        return
    model = ledger.get("model")
    rows = [("model", _model(model, model["layers"]))] if model else []
    rows += _layouts(ledger)
    rows += [
        (action, counted(count, "tensor")) for action, count in ledger["counts"].items() if count
    ]
    if computed := ledger.get("computed"):
        rows.append(
            (
                "values",
                f"{computed['values']} computed in float32; {computed['not_exact']} of them, as "
                f"stored, do not give {_source(ledger)}'s value back",
            )
        )
    if base := ledger.get("base"):
        rows.append(("base", _base_text(base)))
    for adapter in ledger.get("adapters", ()):
        rows += _adapter_rows(adapter)
    if "survival" in ledger:
        rows.append(("delta kept", _kept(ledger["survival"])))
    rows += ledger.get("summary", {}).items()
    rows += [
        ("written", f"{size_text(ledger['bytes'])} in {ledger['seconds']:.1f} s"),
        ("peak memory", size_text(ledger["peak_memory_bytes"])),
        ("verified", "read back and compared, every tensor"),
        ("output", ledger["output"]["path"]),
    ]
    _table("Ledger", rows)
    _show_dropped(ledger["dropped"])


def _layouts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The row that tells in which layout the weights are read and written."""
    layouts = told.get("layouts")
    if layouts is None:
        return []
    one, other = layouts["from"], layouts["to"]
    return [("layout", f"{one}, as it was" if one == other else f"{one} to {other}")]


def _source(ledger: Mapping[str, Any]) -> str:
    """The layout that was read."""
    return str(ledger.get("layouts", {}).get("from", "the source"))


def _base_text(base: Mapping[str, Any]) -> str:
    if "compared_with" not in base:
        return str(base["used"])
    return (
        f"{base['used']}; {base['compared_with']} differs by at most {base['largest']:.3g}, "
        f"by {base['mean']:.3g} on average"
    )


def _adapter_rows(adapter: Mapping[str, Any]) -> list[tuple[str, str]]:
    found, applied, changed = (adapter[f"pairs_{x}"] for x in ("found", "applied", "changed"))
    weight = "" if adapter["weight"] == 1 else f", weight {adapter['weight']:g}"
    replaced = adapter["replaced"]
    rows = [
        (
            adapter["kind"],
            f"rank {_span(adapter['ranks'])}, scale {_span(adapter['scales'])}{weight}",
        ),
        ("pairs", f"{found} found, {applied} applied, {changed} changed the weights"),
    ]
    return rows + ([("replaced", f"{len(replaced)}, such as {replaced[0]}")] if replaced else [])


def _span(values: list[float]) -> str:
    """Sorted numbers, the middle of many left out."""
    texts = [f"{value:g}" for value in values]
    return ", ".join(texts) if len(texts) < 5 else f"{texts[0]} to {texts[-1]}"


def _kept(survival: Mapping[str, Any]) -> str:
    if not survival["weights"]:
        return "nothing was merged"
    share = survival["weights_changed"] / survival["weights"]
    return (
        f"to a relative error of {survival['relative_error']:.2%}; "
        f"{share:.1%} of the merged weights changed"
    )


ENOUGH = 0.5
"""Relative error of the realised delta above which it is hardly the one that was trained."""


def _warn_of_losses(ledger: Mapping[str, Any]) -> None:
    lost = sum(a["pairs_found"] - a["pairs_changed"] for a in ledger.get("adapters", ()))
    if lost:
        click.echo(
            f"warning: {lost} pairs change no weight; what vanished in the rounding to the stored "
            "dtype, --dtype float32 keeps",
            err=True,
        )
    poor = [n for n, s in ledger.get("survival_by_tensor", {}).items() if _error(s) > ENOUGH]
    if poor and not lost:
        count = f"{len(poor)} of {len(ledger['survival_by_tensor'])} merged tensors keep"
        click.echo(
            f"warning: {count} less than half of their delta in the stored dtype, such as "
            f"{poor[0]}; ship the adapter unmerged (orbax-to-peft), or merge with --dtype float32",
            err=True,
        )


def _error(survival: Mapping[str, Any]) -> float:
    error: float = survival["relative_error"]
    return error


def _show_dropped(dropped: Mapping[str, str], most: int = 10) -> None:
    for reason, count in Counter(dropped.values()).most_common(most):
        example = next(name for name, text in dropped.items() if text == reason)
        more = f" and {count - 1} more" if count > 1 else ""
        click.echo(one_line(f"dropped {example}{more}: {reason}"))


def _model(model: Mapping[str, Any], layers: int) -> str:
    return f"{model['name'] or model['family']}, {layers} layers"


def _table(title: str, rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(one_line, row))
    Console().print(table, markup=False)
