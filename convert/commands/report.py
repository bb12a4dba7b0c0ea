"""Plans and ledgers as tables on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from gemma_convert.console import print_json, size_text
from gemma_convert.convert.jobs import Job


def show_notes(job: Job) -> None:
    """Print what a user should know about how the inputs were opened."""
    told = (*job.plan.sources, job.plan.target)
    for note in dict.fromkeys(note for checkpoint in told for note in checkpoint.notes):
        click.echo(f"note: {note}", err=True)


def plan_json(job: Job) -> dict[str, Any]:
    """A plan for machines."""
    plan = job.plan
    return {
        "model": {"family": job.model.family.name, "name": job.model.name},
        "inputs": [source.source for source in plan.sources],
        "counts": plan.counts,
        "dropped": dict(plan.dropped),
        "bytes": plan.target.nbytes,
        "pairs": len(job.adapter.pairs) if job.adapter else 0,
        "tensors": {
            name: {
                "action": plan.actions[name],
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
            }
            for name, tensor in plan.target.items()
        },
    }


def show_plan(job: Job, *, as_json: bool) -> None:
    """Print what would be done."""
    if as_json:
        print_json(plan_json(job))
        return
    plan = job.plan
    rows = [("model", _model(plan_json(job)["model"], len(job.model.layers)))]
    rows += [(action, f"{count} tensors") for action, count in plan.counts.items() if count]
    if job.adapter:
        rows.append(("LoRA pairs", f"{len(job.adapter.pairs)}, alpha {job.adapter.alpha:g}"))
    rows.append(("to write", size_text(plan.target.nbytes)))
    _table("Plan: nothing was written", rows)
    _show_dropped(plan.dropped)


def show_ledger(ledger: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what was done."""
    adapter = ledger.get("adapter")
    if adapter:
        _warn_of_losses(adapter)
    if as_json:
        print_json(ledger)
        return
    rows = [("model", _model(ledger["model"], ledger["model"]["layers"]))]
    rows += [(action, f"{count} tensors") for action, count in ledger["counts"].items() if count]
    if computed := ledger.get("computed"):
        rows.append(
            (
                "values",
                f"{computed['values']} computed in float32; {computed['not_exact']} of them cannot "
                "come back exactly from the stored dtype",
            )
        )
    if adapter:
        rows += _adapter_rows(adapter)
    rows += [
        ("written", f"{size_text(ledger['bytes'])} in {ledger['seconds']:.1f} s"),
        ("peak memory", size_text(ledger["peak_memory_bytes"])),
        ("verified", "read back and compared, every tensor"),
        ("output", ledger["output"]["path"]),
    ]
    _table("Ledger", rows)
    _show_dropped(ledger["dropped"])


def _adapter_rows(adapter: Mapping[str, Any]) -> list[tuple[str, str]]:
    found, applied, changed = (adapter[f"pairs_{x}"] for x in ("found", "applied", "changed"))
    survival = adapter["survival"]
    share = survival["weights_changed"] / survival["weights"]
    ranks = ", ".join(map(str, adapter["ranks"]))
    return [
        ("LoRA", f"rank {ranks}, alpha {adapter['alpha']:g}"),
        ("pairs", f"{found} found, {applied} applied, {changed} changed the weights"),
        (
            "delta kept",
            f"to a relative error of {survival['relative_error']:.2%}; "
            f"{share:.1%} of the merged weights changed",
        ),
    ]


def _warn_of_losses(adapter: Mapping[str, Any]) -> None:
    if adapter["pairs_changed"] < adapter["pairs_found"]:
        lost = adapter["pairs_found"] - adapter["pairs_changed"]
        click.echo(
            f"warning: {lost} pairs vanish in the rounding to the stored dtype; "
            "merge with --dtype float32 to keep them",
            err=True,
        )
    elif adapter["survival"]["relative_error"] > 0.5:
        click.echo(
            "warning: less than half of the delta survives the rounding to the stored dtype; "
            "merge with --dtype float32, or serve the adapter unmerged",
            err=True,
        )


def _show_dropped(dropped: Mapping[str, str], most: int = 10) -> None:
    for reason, count in Counter(dropped.values()).most_common(most):
        example = next(name for name, text in dropped.items() if text == reason)
        more = f" and {count - 1} more" if count > 1 else ""
        click.echo(f"dropped {example}{more}: {reason}")


def _model(model: Mapping[str, Any], layers: int) -> str:
    return f"{model['name'] or model['family']}, {layers} layers"


def _table(title: str, rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)
