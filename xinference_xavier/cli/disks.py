"""The commands for what replicas of this host have saved on a disk."""

import sqlite3
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from xinference_xavier import disk as stores
from xinference_xavier.cli import tables


def _of_folder(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument; a folder that cannot be read ends the command with a sentence."""

    @click.argument(
        "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER"
    )
    @wraps(command)
    def wrapped(folder: Path, **options: Any) -> None:
        try:
            command(folder, **options)
        except (OSError, sqlite3.Error) as error:
            click.echo(f"Error: {folder} cannot be read: {error}", err=True)
            sys.exit(1)

    return wrapped


@click.group()
def disk() -> None:
    """Look at what replicas of this host have saved.

    FOLDER is the value of xavier_disk.
    """


@disk.command()
@_of_folder
def ls(folder: Path) -> None:
    """List the stores. Each model, its weights, and the layout of its cache have their own."""
    tables.console().print(tables.stores_table(stores.summaries(folder)))


@disk.command()
@_of_folder
def check(folder: Path) -> None:
    """Read all rows, and verify their checksums. Replicas may go on meanwhile."""
    wrong = 0
    for summary in stores.summaries(folder):
        if summary.problem:
            wrong += 1
            click.echo(f"{summary.folder.name}: {summary.problem}")
            continue
        checked = stores.check(summary.folder, summary.notes["row_bytes"])
        wrong += checked.wrong
        click.echo(f"{summary.folder.name}: {checked.right:,} right, {checked.wrong:,} wrong")
    if wrong:
        click.echo("Replicas find what is wrong themselves and never use it.")
    sys.exit(1 if wrong else 0)


@disk.command()
@_of_folder
@click.option("--model", help="Only the stores of this model.")
def clear(folder: Path, model: str | None) -> None:
    """Remove the stores. Replicas that use one begin another."""
    found = stores.summaries(folder)
    removed = [each for each in found if model in (None, each.notes.get("model"))]
    for each in removed:
        stores.remove(each.folder)
    freed = tables.size(sum(each.bytes for each in removed))
    click.echo(f"{len(removed)} of {len(found)} stores removed, {freed} freed")
