"""``gemma-convert push``: a directory to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import click

from gemma_convert.console import output_options


@click.command("push")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("repo")
@click.option("--public", is_flag=True, help="Make the repository visible to everyone.")
@click.option("--base-model", help="Hub id of the base model, for the card.")
@click.option("--license", "license_name", help="Licence for the card, as the Hub names it.")
@click.option("--yes", is_flag=True, help="Replace and delete files there without asking.")
@click.option("--dry-run", is_flag=True, help="Show what would go and what the card would say.")
@output_options
def command(
    directory: Path,
    repo: str,
    public: bool,
    base_model: str | None,
    license_name: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Push DIRECTORY, a model, an adapter or an Orbax checkpoint, to the Hub as REPO (ORG/NAME).

    The repository is made if need be, private unless --public. Weights are sent first, then one
    commit shows everything at once and deletes the shards of an earlier push; last, sizes and
    digests there are compared with those here. Run it again to go on after an interruption. A model
    card is generated; a README.md of your own is kept. What is published names no local path.

    The token is that of `hf auth login` or HF_TOKEN.

    \b
    Example:
      gemma-convert push merged/ my-org/gemma-3-270m-sft --base-model google/gemma-3-270m
    """
    from gemma_convert.convert.commands.push_directory import push_directory
    from gemma_convert.convert.commands.push_options import PushOptions

    options = PushOptions(repo, public, yes, base_model, license_name)
    push_directory(directory, options, dry_run=dry_run, as_json=as_json, quiet=quiet)
