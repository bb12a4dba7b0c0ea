"""``--report``: where a command writes its HTML report, looked at before anything is done."""

from __future__ import annotations

from pathlib import Path

import click


def _checked(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in (".html", ".htm"):
        raise click.BadParameter(f"{path} does not end in .html; name a page, which is replaced")
    if path is not None:
        there = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir() or not there.is_dir():
            raise click.BadParameter(f"{path}: no file can be made there; name one in a directory")
    return path


report_option = click.option(
    "--report",
    type=click.Path(path_type=Path),
    callback=_checked,
    help="Write an HTML report: one self-contained page.",
)
