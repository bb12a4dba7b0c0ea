"""What `push` and `--push-to-hub` share: look, ask, push, report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gemma_convert.console import print_json, progress, size_text
from gemma_convert.convert.commands.push_options import PushOptions
from gemma_convert.convert.errors import GemmaConvertError, RemoteError
from gemma_convert.convert.hub.front_matter import read_front_matter
from gemma_convert.convert.hub.model_card import CARD_NAME
from gemma_convert.convert.hub.names import parse_repo_id
from gemma_convert.convert.hub.push import Push, check_target, plan_push, push
from gemma_convert.convert.hub.remote_state import RemoteState
from gemma_convert.convert.hub.session import bars_on_terminals, hub_api, require_token
from gemma_convert.convert.hub.source import read_source
from gemma_convert.convert.printable import one_line


def check_push(options: PushOptions) -> RemoteState:
    """Find out before any work whether the push can go where it should.

    Raises:
        GemmaConvertError: No token, no access, or a name that cannot be one.
    """
    repo = parse_repo_id(options.repo)
    require_token()
    return check_target(hub_api(), repo, public=options.public)


def push_directory(
    directory: Path, options: PushOptions, *, dry_run: bool, as_json: bool, quiet: bool
) -> None:
    """Push ``directory``; see `push.command`.

    Raises:
        GemmaConvertError: See `read_source`, `check_target` and `push`.
    """
    repo = parse_repo_id(options.repo)
    source = read_source(directory, repo, base_model=options.base_model, license=options.license)
    online = True
    try:
        remote = check_push(options)
    except RemoteError as error:
        if not dry_run:
            raise
        online, remote = False, RemoteState(exists=False)
        click.echo(f"note: the Hub was not looked at: {error}", err=True)
    api = hub_api()
    with progress("hashing", source.nbytes, quiet=quiet) as advance:
        plan = plan_push(
            api if online else None, source, repo, remote, public=options.public, progress=advance
        )
    if not quiet:
        for note in plan.notes:
            click.echo(f"note: {one_line(note)}", err=True)
    if dry_run:
        _show_plan(plan, as_json=as_json, quiet=quiet)
        return
    if not options.yes:
        _ask(plan)
    with bars_on_terminals(quiet=quiet):
        done = push(api, plan, _say(quiet=quiet))
    _show_done(done, as_json=as_json, quiet=quiet)


def push_output(out: Path, options: PushOptions, *, quiet: bool) -> None:
    """Push what a command has just written; the output stays whatever happens.

    Raises:
        GemmaConvertError: See `push_directory`; the message tells how to go on.
    """
    again = f"the output is complete: gemma-convert push {out} {options.repo}"
    try:
        push_directory(out, options, dry_run=False, as_json=False, quiet=quiet)
    except KeyboardInterrupt as error:
        error.add_note(again)
        raise
    except GemmaConvertError as error:
        raise RemoteError(str(error), again) from error


def _ask(plan: Push) -> None:
    """Ask before anything there is replaced or deleted; without a terminal, refuse."""
    if not plan.delete and not plan.replaced:
        return
    parts = [f"delete {name}" for name in plan.delete]
    parts += [f"replace {name}" for name in plan.replaced]
    if not sys.stdin.isatty():
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        raise RemoteError(
            f"{plan.repo} has another model: this would {', '.join(parts[:3])}{more}",
            "say yes with --yes, or choose another name",
        )
    for part in parts:
        click.echo(f"would {part}", err=True)
    click.confirm(f"Change {plan.repo} so?", abort=True, err=True)


def _say(*, quiet: bool) -> Callable[[str], None]:
    return (lambda line: None) if quiet else (lambda line: click.echo(line, err=True))


def plan_json(plan: Push) -> dict[str, Any]:
    """A planned push for machines."""
    card = next(file for file in plan.files if file.name == CARD_NAME)
    text = (card.data or b"").decode()
    return {
        "repo": plan.repo,
        "exists": plan.remote.exists,
        "private": plan.remote.private if plan.remote.exists else not plan.public,
        "files": {
            file.name: {"bytes": file.size, "sha256": file.sha256, "sent": file in plan.to_send}
            for file in plan.files
        },
        "bytes": sum(file.size for file in plan.to_send),
        "replaced": list(plan.replaced),
        "deleted": list(plan.delete),
        "metadata": read_front_matter(text, CARD_NAME),
        "card": text,
        "notes": list(plan.notes),
    }


def _show_plan(plan: Push, *, as_json: bool, quiet: bool) -> None:
    shown = plan_json(plan)
    if as_json:
        print_json(shown)
        return
    if quiet:
        return
    state = "private" if shown["private"] else "public"
    what = "there" if plan.remote.exists else "would be made"
    click.echo(f"{plan.repo} ({what}, {state}); nothing was sent")
    for name, file in shown["files"].items():
        verb = "unchanged" if not file["sent"] else "replace" if name in plan.replaced else "add"
        click.echo(f"{verb:>9}  {size_text(file['bytes']):>9}  {name}")
    for name in plan.delete:
        click.echo(f"{'delete':>9}  {'':>9}  {name}")
    click.echo(f"\n{CARD_NAME}:\n{shown['card']}", nl=False)


def _show_done(done: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json(done)
    elif not quiet:
        state = "private" if done["private"] else "public"
        click.echo(
            f"{done['url']} ({state}): {len(done['uploaded'])} files sent "
            f"({size_text(done['bytes'])}), {len(done['unchanged'])} unchanged, "
            f"{len(done['deleted'])} deleted; sizes and digests there are those here"
        )
