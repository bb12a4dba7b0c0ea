"""``gemma-convert inspect``: what lies at a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gemma_convert.console import output_options, print_json, size_text


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Step of an Orbax root; the newest finished if left out.")
@click.option("--tensors", is_flag=True, help="List every tensor with dtype and shape.")
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="Base of an adapter: compare its deltas with the weights, which are read.",
)
@click.option("--alpha", type=float, help="LoRA alpha, if the checkpoint does not say it.")
@output_options
def command(
    path: Path,
    step: int | None,
    tensors: bool,
    base: Path | None,
    alpha: float | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Tell what lies at PATH, from headers alone.

    Understands Orbax checkpoints, safetensors files, Hugging Face directories and PEFT adapters:
    format, layout, model, dtypes, LoRA ranks and scales, steps, and where config.json and tensors
    disagree. PATH may be a repository on the Hub (hf://ORG/NAME@REV) or a bucket (gs://...), of
    which only headers are fetched.

    \b
    Example:
      gemma-convert inspect runs/sft/1244 --tensors
    """
    from gemma_convert.convert.inspect import inspect, tensor_list
    from gemma_convert.convert.readers import open_base, open_headers

    checkpoint = open_headers(path, step)
    report = inspect(checkpoint, open_base(base) if base is not None else None, alpha)
    if tensors:
        report["tensor_list"] = tensor_list(checkpoint)
    if as_json:
        print_json(report)
    elif not quiet:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from gemma_convert.convert.printable import one_line

    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _rows(report):
        table.add_row(label, one_line(text))
    console = Console(markup=False, highlight=False)
    console.print(table)
    for tensor in report.get("tensor_list", ()):
        console.print(f"{tensor['name']}  {tensor['dtype']}  {tensor['shape']}", soft_wrap=True)


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("path", report["path"]), ("format", report["format"])]
    layout, model, adapter = report["layout"], report["model"], report["adapter"]
    if layout:
        prefix = f", prefix {layout['prefix']}" if layout["prefix"] else ""
        rows.append(("layout", f"{layout['name']}{prefix} ({layout['evidence']})"))
    else:
        rows.append(("layout", "none known here"))
    if model:
        name = f"{model['name']}, " if model["name"] else ""
        text = f"{name}{model['family']}, {model['layers']} layers ({model['evidence']})"
        sizes = ", ".join(f"{a} {'/'.join(map(str, s))}" for a, s in model["sizes"].items())
        rows += [("model", text), ("sizes", sizes)]
        rows += [("rope", f"{kind}: {_rope_text(x)}") for kind, x in model.get("rope", {}).items()]
    rows += [
        (f"{t['part']} tower", f"{t['name']}, {t['layers']} layers, {t['tensors']} tensors")
        for t in report["towers"]
    ]
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in report["dtypes"].items())
    rows.append(("parameters", f"{dtypes} in {report['tensors']} tensors"))
    rows.append(("bytes", size_text(report["bytes"])))
    rows += [("quantised", _quantised_text(scheme)) for scheme in report["quantised"]]
    if adapter:
        rows += _adapter_rows(adapter)
    if report["steps"]:
        rows.append(("step", _step_text(report["steps"])))
    if report["side_files"]:
        rows.append(("side files", ", ".join(report["side_files"])))
    rows += [("not read", f"{name}: {reason}") for name, reason in report["not_read"].items()]
    rows += [("note", note) for note in report["notes"]]
    rows += [("DISAGREES", text) for text in report["disagreements"][:20]]
    return rows


def _quantised_text(scheme: dict[str, Any]) -> str:
    tile = f"tile {scheme['tile']}" if scheme["tile"] else "no tiles"
    modules = ", ".join(f"{module} x {n}" for module, n in scheme["modules"].items())
    return f"{scheme['codes']}, {tile}, scales {scheme['scales']}: {modules}"


def _rope_text(rope: dict[str, Any]) -> str:
    factor = f", factor {rope['factor']:g}" if rope["factor"] != 1 else ""
    part = f", {rope['partial']:.0%} of a head" if rope["partial"] != 1 else ""
    return f"theta {rope['theta']:,.0f}, {rope['scaling']}{factor}{part}"


def _adapter_rows(adapter: dict[str, Any]) -> list[tuple[str, str]]:
    ranks = ", ".join(f"{n} of rank {r}" for r, n in adapter["ranks"].items())
    found = f"{adapter['kind']}: {adapter['pairs']} pairs, {ranks}; {_alpha_text(adapter)}"
    rows = [("adapter", found)]
    if adapter.get("scales"):
        scales = [f"{scale:g}" for scale in adapter["scales"]]
        shown = ", ".join(scales) if len(scales) < 5 else f"{scales[0]} to {scales[-1]}"
        rows.append(("scale", f"A.B is multiplied by {shown}"))
    if adapter["base_quantization"]:
        rows.append(("trained on", f"the base quantised to {adapter['base_quantization']}"))
    modules = ", ".join(f"{module} x {n}" for module, n in adapter["modules"].items())
    rows += [("modules", modules)] if modules else []
    rows += [("replaces", name) for name in adapter.get("replaced", ())]
    norms = adapter.get("relative_norm_by_module")
    if norms:
        order = sorted(norms, key=lambda name: norms[name])
        for label, name in (("least delta", order[0]), ("largest delta", order[-1])):
            rows.append((label, f"{norms[name]:.3%} of the weight's norm: {name}"))
    return rows


def _alpha_text(adapter: dict[str, Any]) -> str:
    alpha, differs = adapter["alpha"], adapter["alpha_differs"]
    if alpha is None:
        return "alpha by module" if differs else "alpha not stored"
    number = f"{alpha:g}" if isinstance(alpha, int | float) else alpha  # any JSON, if it is wrong
    return f"alpha {number}" + (", of some modules others" if differs else "")


def _step_text(steps: dict[str, Any]) -> str:
    step = "none" if steps["step"] is None else str(steps["step"])
    there = f" of {', '.join(map(str, steps['steps']))}" if steps["steps"] else ""
    item = f", item {steps['item']}" if steps["item"] else ""
    return f"{step}{there}{item}"
