"""The commands for named prefixes."""

import json
import sys
import time
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn

from xinference_xavier.cli import tables
from xinference_xavier.cli.endpoint import with_client
from xinference_xavier.client import XavierClient
from xinference_xavier.stats.answers import NamedPrefix


def question(file: Any, chat: bool) -> dict[str, Any]:
    """The prompt in the file, or the messages, perhaps with tools."""
    try:
        text = file.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file.name} is not UTF-8 ({error}); convert it") from None
    if not chat:
        return {"prompt": text}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--chat: the file is not JSON ({error})") from None
    fields = found if isinstance(found, dict) else {"messages": found}
    if not isinstance(fields.get("messages"), list):
        raise click.UsageError(
            f"--chat: {file.name} has no list of messages; write "
            '[{"role": …, "content": …}, …] or {"messages": […]}'
        )
    return {name: fields[name] for name in ("messages", "tools") if name in fields}


_TTL = "Its life after the last use: 90s, 30m, 1h, 7d."
_COPIES, _RETENTION = click.Choice(["1", "all"]), click.Choice(["soft", "hard"])
_HOW_MANY, _WHETHER = "How many replicas keep it.", "Whether it is evicted last or never."
salted = click.option("--cache-salt", metavar="TEXT", help="The salt of the tenant that asks.")


@click.group()
def prefix() -> None:
    """Name long texts, which replicas compute once and keep."""


@prefix.command()
@click.argument("model")
@click.argument("name")
@click.option(
    "--file",
    type=click.File("r", encoding="utf-8"),
    required=True,
    help="The prompt, or messages with --chat; - is standard input.",
)
@click.option("--chat", is_flag=True, help="The file holds messages, perhaps with tools.")
@click.option("--ttl", default="1h", show_default=True, help=_TTL)
@click.option("--copies", type=_COPIES, default="1", show_default=True, help=_HOW_MANY)
@click.option("--retention", type=_RETENTION, default="soft", show_default=True, help=_WHETHER)
@salted
@click.option("--no-wait", is_flag=True, help="Return before it is computed.")
@with_client
def add(
    client: XavierClient, model: str, name: str, file: Any, chat: bool, no_wait: bool, **terms: Any
) -> None:
    """Keep a prompt or a chat's beginning under NAME.

    Requests use it with the header X-Xavier-Prefix, or with prefix_name in their body.
    """
    terms["copies"] = _copies(terms["copies"])
    added = client.add_prefix(model, name, **question(file, chat), **terms)
    if not no_wait:
        added = _wait(client, model, added, terms["cache_salt"])
    if added.state == "failed":
        click.echo(f"Error: {name} cannot be computed: {added.reason}", err=True)
        sys.exit(1)
    click.echo(f"{name}: {added.state}, {added.tokens:,} tokens in {added.chunks:,} chunks")


def _copies(given: str) -> int | str:
    return int(given) if given == "1" else given


def _wait(
    client: XavierClient, model: str, added: NamedPrefix, cache_salt: str | None
) -> NamedPrefix:
    """Show a progress bar until the prefix is kept or has failed."""
    name = TextColumn("{task.description}", markup=False)
    columns = name, BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    with Progress(*columns, console=tables.console(stderr=True), transient=True) as bar:
        task, latest = bar.add_task(added.name, total=1.0), added
        for latest in client.watch_prefix(model, added.name, cache_salt):
            bar.update(task, completed=latest.progress)
    return latest


@prefix.command(name="list")
@click.argument("model")
@salted
@click.option("--json", "as_json", is_flag=True, help="Print the server's answers.")
@with_client
def list_(client: XavierClient, model: str, cache_salt: str | None, as_json: bool) -> None:
    """Show MODEL's named prefixes."""
    found = client.prefixes(model, cache_salt)
    if as_json:
        click.echo(json.dumps([each.raw for each in found], indent=2))
    else:
        tables.console().print(tables.prefixes_table(found, time.time()))


@prefix.command()
@click.argument("model")
@click.argument("name")
@salted
@with_client
def show(client: XavierClient, model: str, name: str, cache_salt: str | None) -> None:
    """Print what is known of a named prefix, as JSON."""
    click.echo(json.dumps(client.prefix(model, name, cache_salt).raw, indent=2))


@prefix.command(name="set")
@click.argument("model")
@click.argument("name")
@click.option("--ttl", help=_TTL)
@click.option("--copies", type=_COPIES, help=_HOW_MANY)
@click.option("--retention", type=_RETENTION, help=_WHETHER)
@salted
@with_client
def set_(
    client: XavierClient, model: str, name: str, cache_salt: str | None, **terms: str | None
) -> None:
    """Change how a named prefix is kept."""
    given: dict[str, Any] = {key: value for key, value in terms.items() if value is not None}
    if not given:
        raise click.UsageError("nothing is given; give --ttl, --copies or --retention")
    if "copies" in given:
        given["copies"] = _copies(given["copies"])
    now = client.change_prefix(model, name, cache_salt, **given)
    click.echo(f"{name}: ttl {now.ttl:g} s, copies {now.copies}, retention {now.retention}")


@prefix.command()
@click.argument("model")
@click.argument("name")
@salted
@with_client
def remove(client: XavierClient, model: str, name: str, cache_salt: str | None) -> None:
    """Forget a name. Its chunks stay in the pools as long as there is room."""
    client.remove_prefix(model, name, cache_salt)
    click.echo(f"{name} is removed")
