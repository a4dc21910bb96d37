"""The commands' output for people."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import pick_unit_and_suffix
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xinference_xavier.client.doctor import Finding
from xinference_xavier.disk_store import Summary
from xinference_xavier.stats.answers import Explanation, NamedPrefix
from xinference_xavier.stats.schema import (
    Counters,
    Figure,
    Histogram,
    ModelStatus,
    PoolStats,
    Predictions,
    ReplicaStatus,
    RoutingStats,
    Totals,
    figures_of,
)

_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"]
_SHARES = (0.5, 0.9, 0.99)
_SHARES_TOLD = "median/90 %/99 %"
_COLUMNS = tuple(each for each in figures_of(Totals) if each.heading)
_OF_ROUTING = tuple(each for each in figures_of(RoutingStats) if each.heading)
_WIDTH = 64  # of a prompt's picture; a character stands for one chunk or several


def console(stderr: bool = False) -> Console:
    out = Console(stderr=stderr, markup=False)  # names and reasons may have brackets
    if not out.is_terminal:
        out.width = 200  # wide tables for pipes and files
    return out


def new_table(left: Iterable[str], right: Iterable[str] = ()) -> Table:
    """A table for people, with texts on the `left` and numbers on the `right`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name.replace("_", " "), justify="right")
    return table


def size(count: float) -> str:
    unit, name = pick_unit_and_suffix(int(count), _UNITS, 1024)
    return f"{count:.0f} B" if unit == 1 else f"{count / unit:.1f} {name}"


def models_table(models: Iterable[ModelStatus]) -> RenderableType:
    shown = [model_table(model) for model in models]
    if not shown:
        return Text(
            "No model shares its cache. Launch one with two replicas and --enable_xavier true."
        )
    return Group(*shown)


def model_table(model: ModelStatus) -> RenderableType:
    table = new_table(["replica"], [*(each.heading for each in _COLUMNS), "pool"])
    for replica in model.replicas:
        name = replica.replica + (" (no answer)" if replica.stale else "")
        if replica.draining:
            load = model.routing.loads.get(replica.replica)
            name += f" (draining, {'?' if load is None else load.requests} requests left)"
        table.add_row(name, *_cells(replica), _pool(replica.pool))
    if len(model.replicas) > 1:
        table.add_row("all", *_cells(model.totals), style="bold")
    lines = [Text(line) for line in (*_first_tokens(model.totals), *_routing(model.routing))]
    lines += [Text(line, style="yellow") for line in _remarks(model)]
    state = ("on", "green") if model.enabled else ("off", "red")
    title = Text.assemble((model.model_uid, "bold"), ", sharing ", state)
    return Panel(Group(table, *lines), title=title, title_align="left", expand=False)


def _cells(counters: Counters) -> Iterator[str]:
    return (shown(each, counters) for each in _COLUMNS)


def shown(figure: Figure, source: object) -> str:
    """A number in its unit, or several with what each is of."""
    values = figure.values(source)
    if not figure.labels:
        return _number(values[()], figure) if values else "-"
    counts = (" ".join((_number(count, figure), *labels)) for labels, count in values.items())
    return ", ".join(counts) or "0"


def _number(value: float, figure: Figure) -> str:
    if figure.unit == "bytes":
        return size(value)
    return f"{value:.0%}" if figure.unit == "share" else f"{value:,}"


def _pool(pool: PoolStats) -> str:
    if not pool.rows:
        return "-"
    return f"{pool.used / pool.rows:.0%} of {size(pool.rows * pool.row_bytes)}"


def _first_tokens(counters: Counters) -> Iterator[str]:
    waits = {
        name.replace("_", " "): _quantiles(each)
        for name, each in vars(counters.first_tokens).items()
        if sum(each.counts)
    }
    if waits:
        told = ", ".join(f"{source} {seconds}" for source, seconds in waits.items())
        yield f"Time to first token in seconds ({_SHARES_TOLD}): {told}."


def _quantiles(histogram: Histogram) -> str:
    return "/".join(f"{histogram.quantile(share) or 0.0:.2f}" for share in _SHARES)


def _routing(stats: RoutingStats) -> Iterator[str]:
    """All of it in one line, and whether the forecasts were true in another."""
    if not stats.mode:
        return
    sent = [f"{count:,} requests to {name}" for name, count in sorted(stats.replicas.items())]
    counts = {each.heading: shown(each, stats) for each in _OF_ROUTING}
    sent += [f"{count} {what}" for what, count in counts.items() if count != "0"]
    yield f"Routing {stats.mode}: {', '.join(sent) or 'no requests yet'}."
    if stats.first_bytes:
        told = "; ".join(f"{reason}, {_told(each)}" for reason, each in stats.first_bytes.items())
        yield f"First byte, forecast and actual, in seconds ({_SHARES_TOLD}): {told}."
        rest = _told(stats.decodes)
        yield f"From there to the last byte, in seconds ({_SHARES_TOLD}): {rest}."


def _told(found: Predictions) -> str:
    return (
        f"predicted {_quantiles(found.predicted)}, actual {_quantiles(found.actual)}, "
        f"error {_quantiles(found.error)}"
    )


def _remarks(model: ModelStatus) -> list[str]:
    """Hints below the table."""
    remarks = []
    if model.totals.seconds_saved:
        remarks.append(f"Reuse saved about {model.totals.seconds_saved:.1f} s of prefill.")
    if not model.replicas:
        remarks.append("No replica has joined yet.")
    elif len(model.replicas) == 1:
        remarks.append("One replica: nothing is shared until another is added.")
    namespaces = {replica.namespace for replica in model.replicas}
    if len(namespaces) > 1:
        remarks.append(
            f"The replicas are in {len(namespaces)} namespaces and share only within each: "
            "`xinference-xavier doctor` says why."
        )
    remarks += [
        f"{replica.replica} shares nothing, as its engine {replica.verdict}: "
        f"{replica.verdict_reason}."
        for replica in model.replicas
        if replica.verdict == "cannot compare"
    ]
    if model.tracker.dropped:
        remarks.append(f"The tracker has no room to list {model.tracker.dropped:,} chunks.")
    return remarks


def explanation_table(answer: Explanation, replicas: Iterable[ReplicaStatus]) -> RenderableType:
    per_character = max(1, -(-len(answer.chunks) // _WIDTH))
    holds = "holds (■ all, ▪ part, · none)"
    table = new_table(["replica", holds, "cannot fetch"], ["from the beginning"])
    for replica in replicas:
        held = [replica.incarnation in chunk.holders for chunk in answer.chunks]
        picture = "".join(
            _mark(held[at : at + per_character]) for at in range(0, len(held), per_character)
        )
        reason, tokens = replica.not_sharing or "", answer.held(replica.incarnation)
        table.add_row(replica.replica, picture or "-", reason, f"{tokens:,}")
    title = (
        f"{answer.prompt_tokens:,} tokens: {len(answer.chunks)} whole chunks of "
        f"{answer.chunk_tokens}"
    )
    missing = [Text(f"\nMissing: {answer.missing}.")] if answer.missing else []
    return Group(Text(title), table, *missing)


def prefixes_table(prefixes: Iterable[NamedPrefix], now: float) -> RenderableType:
    """`now` is the wall-clock time."""
    texts = ["name", "state", "retention", "replicas"]
    table = new_table(texts, ["tokens", "chunks", "expires in"])
    for each in prefixes:
        state = f"{each.state}: {each.reason}" if each.reason else each.state
        left = timedelta(seconds=max(0, round(each.expires - now)))
        replicas = ", ".join(sorted(each.replicas)) or "-"
        counts = f"{each.tokens:,}", f"{each.chunks:,}", str(left)
        table.add_row(each.name, state, each.retention, replicas, *counts)
    return table if table.row_count else Text("No prefix has a name yet.")


def stores_table(stores: Iterable[Summary]) -> RenderableType:
    table = new_table(["model", "last used"], ["chunks", "size"])
    table.add_column("folder")
    for each in stores:
        used = datetime.fromtimestamp(each.used).isoformat(" ", "minutes")
        table.add_row(
            each.model or "(not in use)", used, f"{each.rows:,}", size(each.bytes), each.folder.name
        )
    return table if table.row_count else Text("No replica has saved anything there.")


def findings_list(findings: list[Finding], cluster: Mapping[str, Any]) -> RenderableType:
    models, workers = len(cluster["models"]), len(cluster["workers"])
    lines = Text()
    if not findings:
        lines.append(f"No problems found (models: {models}, workers: {workers}).\n", style="green")
    for finding in findings:
        lines.append("✗ " if finding.grave else "! ", style="red" if finding.grave else "yellow")
        lines.append(f"{finding.where}: ", style="bold")
        lines.append(f"{finding.problem}\n")
        lines.append("  remedy: ", style="dim")
        lines.append(f"{finding.remedy}\n")
    for uid, model in cluster["models"].items():
        for replica in model.get("report", {}).get("replicas", ()):
            name = replica.get("replica", replica["incarnation"])
            replaced = replica.get("replaced_vllm")
            instead = f", and its definition asks for {replaced}" if replaced else ""
            runs = f"runs vLLM {replica['vllm'] or 'unknown'}{instead}"
            lines.append(f"{uid}: {name} {runs}\n", style="dim")
            if given := replica.get("from_environment"):
                options = ", ".join(f"xavier_{option}" for option in given)
                lines.append(f"{uid}: {name} has {options} from the environment\n", style="dim")
        for line in _links(model):
            lines.append(f"{uid}: {line}\n", style="dim")
    lines.rstrip()
    return lines


def _links(model: Mapping[str, Any]) -> Iterator[str]:
    """A line for each link: its transport, and the reasons against better ones."""
    replicas = model.get("report", {}).get("replicas", ())
    names = {each["incarnation"]: each.get("replica", each["incarnation"]) for each in replicas}
    for incarnation, check in model.get("self_checks", {}).items():
        for peer, transport in check.get("linked_to", {}).items():
            reasons = check["obstacles"].get(peer, {}).items()
            because = "".join(f", not {name} ({reason})" for name, reason in reasons)
            ends = f"{names.get(incarnation, incarnation)} from {names.get(peer, peer)}"
            yield f"{ends} by {transport}{because}"


def _mark(held: list[bool]) -> str:
    return "■" if all(held) else "▪" if any(held) else "·"
