"""`xinference-xavier launches`: what saved launches and autostarts mean with this extension, and
without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from xinference_xavier.cli.endpoint import with_client
from xinference_xavier.cli.tables import console
from xinference_xavier.client import XavierClient
from xinference_xavier.config import (
    ENABLE,
    is_own_option,
    is_xavier_option,
    take_launch_options,
)
from xinference_xavier.errors import ConfigError
from xinference_xavier.options import parse_bool


class SavedLaunch(NamedTuple):
    """A launch in xinference's history that has options of a Xavier."""

    model_name: str
    model_uid: str
    starts_by_itself: bool
    is_own: bool
    """The account that asks has saved it. xinference shows nobody else its options."""
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> SavedLaunch:
        arguments = row.get("data")
        return cls(
            row["model_name"],
            row.get("model_uid") or "",
            bool(row.get("autostart_enabled")),
            bool(row.get("is_owner")),
            arguments if isinstance(arguments, Mapping) else {},
        )

    @property
    def options(self) -> dict[str, Any]:
        """Those of a Xavier, ours or the built-in one."""
        return {name: value for name, value in self.arguments.items() if is_xavier_option(name)}

    @property
    def other_arguments(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name not in self.options}

    def with_extension(self) -> str:
        """Who gets the launch here."""
        engine = self.arguments.get("model_engine")
        foreign = str(engine).lower() != "vllm"
        try:
            ours = take_launch_options(self.options, foreign) is not None
        except ConfigError as error:
            return f"refused: {error}"
        if not ours:
            return self._built_in()
        return f"refused: {engine} cannot share" if foreign else "this extension"

    def without_extension(self) -> str:
        """What becomes of it in a cluster that has removed the extension."""
        own = [name for name in self.options if is_own_option(name)]
        if own:
            return f"fails: nobody knows {', '.join(own)}"
        return self._built_in()

    def _built_in(self) -> str:
        options = {name.replace("-", "_"): value for name, value in self.options.items()}
        return "the built-in Xavier" if parse_bool(ENABLE, options.get(ENABLE)) else "nothing"


@click.command()
@click.option(
    "--strip",
    is_flag=True,
    help="Take the options of a Xavier out of what this account has saved: before a removal.",
)
@with_client
def launches(client: XavierClient, strip: bool) -> None:
    """List saved launches and autostarts that switch a Xavier on, and what they mean with this
    extension and without it."""
    saved = [each for each in map(SavedLaunch.of, client.saved_launches()) if each.options]
    if not strip:
        console().print(_table(saved))
        return
    own = [each for each in saved if each.is_own]
    for each in own:
        client.save_launch(each.model_name, each.model_uid, each.other_arguments)
    click.echo(f"{len(own)} saved launches no longer have options of a Xavier")


def _table(saved: Iterable[SavedLaunch]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "uid", "autostart", "options", "with this extension", "without it"):
        table.add_column(title)
    for each in saved:
        options = ", ".join(f"{name}={value}" for name, value in sorted(each.options.items()))
        table.add_row(
            each.model_name,
            each.model_uid,
            "yes" if each.starts_by_itself else "",
            options,
            each.with_extension(),
            each.without_extension(),
        )
    return table if table.row_count else Text("No saved launch has options of a Xavier.")
