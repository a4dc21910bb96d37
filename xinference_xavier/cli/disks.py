"""The commands for what replicas of this host have saved on a disk."""

import mmap
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click

from xinference_xavier.cli import tables
from xinference_xavier.disk_store import DamagedRowError, Store, remove, summaries
from xinference_xavier.errors import ConfigError


def _of_folder(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument; a folder that cannot be read ends the command with a sentence."""

    @click.argument(
        "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER"
    )
    @wraps(command)
    def wrapped(folder: Path, **options: Any) -> None:
        try:
            command(folder, **options)
        except (OSError, ConfigError) as error:
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
    tables.console().print(tables.stores_table(summaries(folder)))


@disk.command()
@_of_folder
def check(folder: Path) -> None:
    """Verify the checksums of all rows, and remove wrong ones. Replicas may go on meanwhile."""
    is_right = True
    for each in summaries(folder):
        if not each.namespace:
            continue
        store = Store(folder, each.namespace, each.row_bytes, each.bytes)
        damaged, unreadable = _verify(store)
        is_right = is_right and not damaged and not unreadable
        text = f"{len(store):,} right, {damaged:,} wrong"
        text += ", removed" if damaged else ""
        text += f", {unreadable:,} cannot be read" if unreadable else ""
        click.echo(f"{each.folder.name}: {text}")
    sys.exit(0 if is_right else 1)


def _verify(store: Store) -> tuple[int, int]:
    """The numbers of wrong rows, which are removed, and of those that cannot be read."""
    damaged = unreadable = 0
    while not store.is_known:
        store.look()
    with mmap.mmap(-1, store.row_bytes) as row, memoryview(row) as view:
        for key in store:
            try:
                store.read(key, view)
            except FileNotFoundError:  # a replica has just removed it
                continue
            except DamagedRowError:
                damaged += 1
            except OSError as error:
                click.echo(f"{store.folder.name}: {key.hex()}: {error}", err=True)
                unreadable += 1
    return damaged, unreadable


@disk.command()
@_of_folder
@click.option("--model", help="Only the stores of this model.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(folder: Path, model: str | None, yes: bool) -> None:
    """Remove the stores, and nothing else. Replicas that use one begin another."""
    found = summaries(folder)
    removed = [each for each in found if model in (None, each.model)]
    if not removed:
        click.echo(f"No store to remove in {folder}.")
        return
    click.echo(f"To be removed, of {len(found)} stores in {folder}:")
    tables.console().print(tables.stores_table(removed))
    if not yes:
        click.confirm("Remove them?", abort=True)
    for each in removed:
        with suppress(FileNotFoundError):  # a replica has removed it
            remove(each.folder)
    freed = tables.size(sum(each.bytes for each in removed))
    click.echo(f"{len(removed)} of {len(found)} stores removed, {freed} freed")
