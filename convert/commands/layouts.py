"""``gemma-convert layouts``: what each layout calls each parameter."""

from __future__ import annotations

import click

from gemma_convert.console import output_options, print_json


@click.command("layouts")
@click.option("--model", help="Show the table of one public model, such as gemma-4-31b.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print all tables as Markdown.")
@output_options
def command(model: str | None, as_markdown: bool, as_json: bool, quiet: bool) -> None:
    """List families, models and layouts; with --model, the correspondence of its parameters.

    \b
    Example:
      gemma-convert layouts --model gemma-4-31b
    """
    from gemma_convert.convert.correspondence import markdown, stacks, table, towers
    from gemma_convert.convert.layouts import LAYOUTS
    from gemma_convert.convert.registry import families, named_model

    if as_markdown:
        click.echo(markdown(), nl=False)
    elif model is not None:
        found = named_model(model)
        parts = {model: found, **{f"{model}: {what}": t for what, t in towers(found).items()}}
        if as_json:
            print_json([entry for part in parts.values() for entry in _entries(*table(part))])
        else:
            for title, part in parts.items():
                _show(title, *table(part))
                for line in stacks(part):
                    click.echo(line)
    else:
        known = {name: list(family.models) for name, family in families().items()}
        if as_json:
            print_json({"layouts": list(LAYOUTS), "families": known})
        elif not quiet:
            _show("layouts: " + ", ".join(LAYOUTS), ["family", "models"], _listed(known))


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
