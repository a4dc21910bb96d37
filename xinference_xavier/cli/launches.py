"""`xinference-xavier launches`: what saved launches and autostarts mean with this extension, and
without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
from rich.console import RenderableType
from rich.text import Text

from xinference_xavier.cli.endpoint import with_client
from xinference_xavier.cli.tables import console, new_table
from xinference_xavier.client import XavierClient
from xinference_xavier.config import (
    ENABLE,
    UPSTREAM_OPTIONS,
    is_xavier_option,
    take_launch_options,
    why_foreign,
)
from xinference_xavier.errors import ApiError, ConfigError

_PLACEMENT = {"model_engine": None, "role": "hybrid"}
"""What xinference assumes of an item of `replica_config`."""


class SavedLaunch(NamedTuple):
    """A launch in xinference's history that has options of a Xavier."""

    model_name: str
    model_uid: str
    autostart: bool
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
        """The options of a Xavier, ours or the built-in one."""
        return {name: value for name, value in self.arguments.items() if is_xavier_option(name)}

    @property
    def other_arguments(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name not in self.options}

    def with_extension(self, environment: Mapping[str, str]) -> str:
        """Who gets the launch here, where the supervisor has this `environment`."""
        items = self.arguments.get("replica_config") or ()
        placements = [SimpleNamespace(**{**_PLACEMENT, **item}) for item in items]
        reason = why_foreign({**self.arguments, "replica_config": placements})
        options = self.options
        try:
            ours = take_launch_options(options, reason is not None, environment) is not None
        except ConfigError as error:
            return _refused(error)
        if not ours:
            return _built_in(options)
        return "this extension" if reason is None else _refused(reason)

    def without_extension(self) -> str:
        """What becomes of it in a cluster that has removed the extension."""
        unknown = self.options.keys() - {ENABLE, *UPSTREAM_OPTIONS}
        if unknown:
            return f"fails: nobody knows {', '.join(sorted(unknown))}"
        return _built_in(self.options)


def _built_in(options: Mapping[str, Any]) -> str:
    """What xinference makes of it: any text switches its Xavier on."""
    return "the built-in Xavier" if options.get(ENABLE) else "nothing"


def _refused(error: ConfigError) -> str:
    return f"refused: {error.option}={error.value!r} {error.reason}"


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
        supervisor = client.cluster()["supervisor"]
        if "error" in supervisor:
            raise ApiError(f"the supervisor does not say what it runs: {supervisor['error']}")
        console().print(_table(saved, supervisor["environment"]))
        return
    own = [each for each in saved if each.is_own]
    for each in own:
        client.save_launch(each.model_name, each.model_uid, each.other_arguments)
    click.echo(f"{len(own)} saved launches no longer have options of a Xavier")


def _table(saved: Iterable[SavedLaunch], environment: Mapping[str, str]) -> RenderableType:
    titles = ["model", "uid", "autostart", "options", "with this extension", "without it"]
    table = new_table(titles)
    for each in saved:
        options = ", ".join(f"{name}={value}" for name, value in sorted(each.options.items()))
        table.add_row(
            each.model_name,
            each.model_uid,
            "yes" if each.autostart else "",
            options,
            each.with_extension(environment),
            each.without_extension(),
        )
    return table if table.row_count else Text("No saved launch has options of a Xavier.")
