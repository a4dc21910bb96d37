"""The commands. xoscar, which takes long to import, is imported where it is used."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click
from rich.live import Live

from xinference_xavier._version import __version__
from xinference_xavier.cli import tables
from xinference_xavier.cli.asking import ask, yes
from xinference_xavier.cli.disks import disk
from xinference_xavier.cli.endpoint import NO_ANSWER, with_client
from xinference_xavier.cli.prefix_commands import prefix, question, salted
from xinference_xavier.cli.trial import trial
from xinference_xavier.client import XavierClient
from xinference_xavier.client.doctor import diagnose
from xinference_xavier.config import parse_options
from xinference_xavier.errors import ConfigError, shown
from xinference_xavier.events import load_hook
from xinference_xavier.options import PARSERS, RETIRED
from xinference_xavier.stats.answers import EventRecord, ModelList
from xinference_xavier.stats.schema import ModelStatus

_EPILOG = """\b
Exit codes:
  0  success: doctor found nothing that keeps replicas from sharing now, and replicas shared (try)
  1  doctor found such a problem; nothing was shared, or an answer is wrong (try); rows are wrong,
     or the folder cannot be read (disk); a prefix cannot be computed; tracker cannot listen
  2  wrong usage, or the model cannot be tried
  3  xinference does not answer, refuses, or lacks the extension; or a tracker does not answer
  4  no such model shares its cache, or it has no prefix of that name

\b
Shell completion:
  bash  eval "$(_XINFERENCE_XAVIER_COMPLETE=bash_source xinference-xavier)"
  zsh   eval "$(_XINFERENCE_XAVIER_COMPLETE=zsh_source xinference-xavier)"
  fish  _XINFERENCE_XAVIER_COMPLETE=fish_source xinference-xavier | source
"""
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_EITHER_DASH = {"token_normalize_func": lambda name: name.replace("-", "_"), **_CONTEXT}


class _Commands(click.Group):
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except UnicodeEncodeError as error:
            # An argument's bytes that are no UTF-8 become halves of characters.
            if not error.reason.startswith("surrogates"):
                raise
            raise click.UsageError(f"{shown(error.object)} is not UTF-8; convert it") from None


@click.group(cls=_Commands, context_settings=_CONTEXT, epilog=_EPILOG)
@click.version_option(__version__, prog_name="xinference-xavier")
def main() -> None:
    """Watch and steer how vLLM replicas of xinference models share their KV cache."""


main.add_command(prefix)
main.add_command(disk)
main.add_command(trial)


@main.command()
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer.")
@click.option("--watch", is_flag=True, help="Update every second until the model ends.")
@with_client
def status(client: XavierClient, model: str | None, as_json: bool, watch: bool) -> None:
    """Show how MODEL, or every model, shares its cache.

    Prompt tokens by source, fetches, and pools.
    """
    if watch:
        if model is None:
            raise click.UsageError("--watch needs a MODEL")
        _watch(client, model, as_json)
        return
    answer = client.models() if model is None else client.status(model)
    if as_json:
        click.echo(json.dumps(answer.raw, indent=2))
    elif isinstance(answer, ModelStatus):
        tables.console().print(tables.model_table(answer))
    elif answer.models or not answer.unavailable:
        tables.console().print(tables.models_table(answer.models))
    if isinstance(answer, ModelList) and answer.unavailable:
        for reason in answer.unavailable.values():
            click.echo(f"Error: {reason}", err=True)
        sys.exit(NO_ANSWER)


def _watch(client: XavierClient, model: str, as_json: bool) -> None:
    if as_json:
        for report in client.watch(model):
            click.echo(json.dumps(report.raw))
        return
    with Live(console=tables.console(), auto_refresh=False) as live:
        for report in client.watch(model):
            live.update(tables.model_table(report), refresh=True)


@main.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@with_client
def events(client: XavierClient, model: str, as_json: bool) -> None:
    """Print MODEL's recent events, then new ones."""
    for record in client.events(model):
        if as_json:
            plain = {"event": record.event, "time": record.time, **record.fields}
            click.echo(json.dumps(plain))
        else:
            click.echo(_line(record))


def _line(record: EventRecord) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    fields = (f"{name}={value}" for name, value in record.fields.items())
    return f"{when}  {record.event}  {'  '.join(fields)}"


@main.command()
@click.argument("model")
@click.option(
    "--prompt-file",
    type=click.File("r", encoding="utf-8"),
    required=True,
    help="The prompt, or messages with --chat; - is standard input.",
)
@click.option("--chat", is_flag=True, help="The file holds messages.")
@salted
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer.")
@with_client
def explain(
    client: XavierClient,
    model: str,
    prompt_file: Any,
    chat: bool,
    cache_salt: str | None,
    as_json: bool,
) -> None:
    """Show which replicas of MODEL hold a prompt's chunks.

    It also says why some are missing.
    vLLM's own prefix cache may have more; its content is not known here.
    """
    answer = client.explain(model, **question(prompt_file, chat), cache_salt=cache_salt)
    if as_json:
        click.echo(json.dumps(answer.raw, indent=2))
        return
    tables.console().print(tables.explanation_table(answer, client.status(model).replicas))


@main.command()
@click.argument("model")
@yes
@with_client
def flush(client: XavierClient, model: str, yes: bool) -> None:
    """Empty the pools of all replicas of MODEL.

    vLLM's own prefix caches keep their content, and no request fails.
    """
    ask(f"Empty the pools of all replicas of {model}?", yes)
    answers = client.flush(model).raw.get("answers", {})
    flushed, unreachable = answers.get("flushed", []), answers.get("unreachable", [])
    click.echo(f"pools of {len(flushed)} replicas are empty")
    if unreachable:
        click.echo(f"no answer from {', '.join(unreachable)}", err=True)
        sys.exit(NO_ANSWER)


@main.command()
@click.argument("model")
@click.argument("version")
@click.option(
    "--tracker",
    "address",
    metavar="HOST:PORT",
    help="The tracker of servers without xinference.",
)
@with_client
def weights(client: XavierClient, model: str, version: str, address: str | None) -> None:
    """Let replicas of MODEL that were reset share again.

    Their weights are VERSION, which is any name. Replicas that were not reset keep sharing among
    themselves.
    """
    if address is None:
        answers = client.set_weights_version(model, version).raw.get("answers", {})
    else:
        answers = _at_tracker(model, address, version)
    joined = answers.get("joined", [])
    click.echo(f"{len(joined)} replicas share as {version}")
    if left := answers.get("not_reset"):
        click.echo(f"not reset since the last version: {', '.join(left)}", err=True)
    if lost := answers.get("unreachable"):
        click.echo(f"no answer from {', '.join(lost)}", err=True)
    if left or lost or not joined:
        sys.exit(NO_ANSWER)


def _at_tracker(model: str, address: str, version: str) -> Mapping[str, Any]:
    from xinference_xavier.cli import standalone

    try:
        return asyncio.run(standalone.set_weights_version(model, address, version))
    except ValueError as error:  # also a ConfigError
        raise click.UsageError(str(error)) from None
    except standalone.UNREACHABLE as error:
        click.echo(f"Error: no tracker of {model} answers at {address} ({error!r})", err=True)
        sys.exit(NO_ANSWER)


@main.command()
@click.argument("model")
@click.argument("state", type=click.Choice(["on", "off"]))
@with_client
def switch(client: XavierClient, model: str, state: str) -> None:
    """Switch sharing of MODEL on or off while it runs."""
    enabled = client.switch(model, state == "on").enabled
    click.echo(f"sharing of {model} is {'on' if enabled else 'off'}")


@main.command()
@click.argument("model")
@click.argument("mode", required=False, type=click.Choice(["auto", "backlog", "off"]))
@with_client
def routing(client: XavierClient, model: str, mode: str | None) -> None:
    """Show or change how requests to MODEL find a replica.

    auto: the replica that answers first; backlog: that with the smallest backlog, whatever it
    holds; off: round-robin.
    """
    status = client.status(model) if mode is None else client.set_routing(model, mode)
    shown = status.routing.mode or "not known: no replica has reported its load yet"
    click.echo(f"routing of {model} is {shown}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@with_client
def doctor(client: XavierClient, as_json: bool) -> None:
    """Find out why replicas do not share, and print the remedy.

    Examines the extension in every process of xinference, addresses, links between replicas,
    namespaces, pools and the tracker. If nothing has come from a peer yet, also what the prompts
    had in common.
    """
    cluster = client.cluster()
    findings = diagnose(cluster)
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        tables.console().print(tables.findings_list(findings, cluster), soft_wrap=True)
    sys.exit(1 if any(finding.grave for finding in findings) else 0)


@main.command(context_settings=_EITHER_DASH)
@click.argument("model")
@click.option("--address", required=True, metavar="HOST:PORT", help="Where the tracker listens.")
@click.option("--xavier_hooks", metavar="MODULE:FUNCTION", help="Called with each event.")
def tracker(model: str, address: str, xavier_hooks: str | None) -> None:
    """Serve the tracker of MODEL for plain vLLM servers.

    It ends when it is interrupted. Servers that use the same name as MODEL share their caches.
    Prints events. Needs no vLLM.
    """
    from xinference_xavier.cli import standalone

    try:
        standalone.endpoint(address)
        hooks = parse_options({"xavier_hooks": xavier_hooks}).hooks
        if hooks is not None:
            load_hook(hooks)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None

    async def serve() -> None:
        await standalone.serve(
            model,
            address,
            hooks=hooks,
            listening=lambda where: click.echo(f"the tracker of {model} listens at {where}"),
            on_event=lambda event: click.echo(_line(EventRecord.from_json(event))),
            until=_interrupted(),
        )

    try:
        asyncio.run(serve())
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


def _interrupted() -> asyncio.Event:
    """Set by the first interrupt; the next one ends the process."""
    until, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop(number: int) -> None:
        until.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return until


_PLAIN = {
    "xavier_pool_bytes": "Host memory for its pool, such as 4GiB; required.",
    "xavier_host": "Its own address for peers, or the network that it is in.",
    "xavier_port_range": "The ports that it may use, as LOW-HIGH.",
    "xavier_chunk_tokens": "Tokens in a chunk; 128 by default.",
    "xavier_transport": "How rows travel: auto, shared_memory, nixl or gloo.",
    "xavier_fetch_timeout": "Seconds until a fetch is given up.",
    "xavier_min_fetch_tokens": "Shorter beginnings are computed, not fetched.",
    "xavier_disk": "A folder on a local disk, below its pool.",
    "xavier_disk_bytes": "How much may be on that disk.",
    "xavier_disk_save": "What is saved there: what was reused, or all.",
    "xavier_audit": "Whether it checks what it has fetched; true by default.",
    "xavier_untested_vllm": "Whether vLLM may be newer than all tested versions.",
}
"""The launch options that mean something in a server without xinference."""


def _launch_options(command: Callable[..., None]) -> Callable[..., None]:
    for name in reversed([*PARSERS, *RETIRED]):
        told = _PLAIN.get(name)  # others are refused with the reason, or ignored with a warning
        command = click.option(f"--{name}", metavar="VALUE", hidden=told is None, help=told)(
            command
        )
    return command


@main.command("transfer-config", context_settings=_EITHER_DASH)
@click.argument("model")
@click.option("--address", required=True, metavar="HOST:PORT", help="Where the tracker listens.")
@click.option("--name", help="The server's name in events and figures.")
@_launch_options
def transfer_config(model: str, address: str, name: str | None, **options: str | None) -> None:
    """Print the --kv-transfer-config of vLLM servers of MODEL.

    The options are those of `xinference launch` that do not need xinference. What is a default is
    not printed.
    """
    from xinference_xavier.cli import standalone

    try:
        config = standalone.transfer_config(model, address, options, name)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    click.echo(json.dumps(config, separators=(",", ":")))
