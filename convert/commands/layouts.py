"""``gemma-convert layouts``: what each layout calls each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from gemma_convert.console import output_options, print_json

if TYPE_CHECKING:  # needs numpy
    from gemma_convert.convert.network import Network


@click.command("layouts")
@click.option("--model", help="Show the table of one public model, such as gemma-4-31b.")
@click.option(
    "--markdown", "as_markdown", is_flag=True, help="Print Markdown; all tables without --model."
)
@output_options
def command(model: str | None, as_markdown: bool, as_json: bool, quiet: bool) -> None:
    """List families, models and layouts; with --model, the correspondence of its parameters.

    \b
    Example:
      gemma-convert layouts --model gemma-4-31b
    """
    from gemma_convert.convert.correspondence import markdown, model_markdown, parts
    from gemma_convert.convert.layouts import LAYOUTS
    from gemma_convert.convert.registry import families, named_model

    if as_markdown and as_json:
        raise click.UsageError("--markdown and --json: choose one.")
    found = named_model(model) if model is not None else None
    if quiet and not as_json:
        return
    if found is not None and model is not None:
        if as_markdown:
            click.echo(model_markdown(model, found), nl=False)
        else:
            _print_model(parts(model, found), as_json=as_json)
    elif as_markdown:
        click.echo(markdown(), nl=False)
    else:
        known = {name: list(family.models) for name, family in families().items()}
        if as_json:
            print_json({"layouts": list(LAYOUTS), "families": known})
        else:
            _show("layouts: " + ", ".join(LAYOUTS), ["family", "models"], _listed(known))


def _print_model(networks: Mapping[str, Network], *, as_json: bool) -> None:
    from gemma_convert.convert.correspondence import stacks, table

    if as_json:
        print_json([entry for part in networks.values() for entry in _entries(*table(part))])
        return
    for title, part in networks.items():
        _show(title, *table(part))
        for line in stacks(part):
            click.echo(line)


def _entries(header: list[str], lines: list[list[str]]) -> list[dict[str, str]]:
    return [dict(zip(header, line, strict=True)) for line in lines]


def _listed(known: dict[str, list[str]]) -> list[list[str]]:
    return [[family, ", ".join(models)] for family, models in known.items()]


def _show(title: str, header: list[str], lines: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")  # a name that is cut is none
    for line in lines:
        table.add_row(*line)
    Console(markup=False, highlight=False).print(table)
