"""Sharing as Prometheus sees it: which metrics there are, and their values from reports. Pure.

Counters are what the replicas counted since their start, so whichever process answers a scrape,
and however often it was started again, the values are the same. A replica that was started again
begins at zero, which Prometheus takes for what it is.

How many series there are is bounded by models and replicas: all other labels have few values, and
what a peer calls otherwise is "other".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xinference_xavier.errors import NOT_SHARING, ROLLBACKS
from xinference_xavier.stats.history import HIT_SOURCES
from xinference_xavier.stats.schema import BYTES_BOUNDS, OUTCOMES, SECONDS_BOUNDS, mapping, number

PREFIX = "xinference:xavier_"
OTHER = "other"
_MAX_TRANSPORTS = 8  # of one replica
_MAX_NAME = 64  # characters of a transport's

Labels = dict[str, str]
HistogramValue = dict[float | str, float]
"""Cumulative counts by upper bound, and "sum" and "count"."""
Sample = tuple[Labels, float | HistogramValue]
Samples = dict[str, list[Sample]]
"""By a family's name without the prefix."""


class Family(NamedTuple):
    name: str  # without the prefix
    kind: str  # "counter", "gauge" or "histogram"
    help: str
    labels: tuple[str, ...] = ()


_MODEL = ("model",)
_REPLICA = ("model", "replica")

FAMILIES = (
    Family("up", "gauge", "Whether the supervisor said in time which models share."),
    Family(
        "scrape_failures_total",
        "counter",
        "Answers of the supervisor or of a tracker that this process missed at scrapes.",
    ),
    Family("tracker_up", "gauge", "Whether the model's tracker answered in time.", _MODEL),
    Family("enabled", "gauge", "Whether the operator's switch is on.", _MODEL),
    Family("replicas", "gauge", "Replicas that have joined the tracker.", _MODEL),
    Family(
        "namespaces",
        "gauge",
        "Groups of replicas that share with each other; more than one is a group too many.",
        _MODEL,
    ),
    Family(
        "replica_up",
        "gauge",
        "Whether the replica answered in time; its figures are of its last heartbeat if not.",
        _REPLICA,
    ),
    Family(
        "sharing",
        "gauge",
        "Whether the replica can fetch from a peer, and the reason if it cannot.",
        (*_REPLICA, "reason"),
    ),
    Family("requests_total", "counter", "Requests that have ended.", _REPLICA),
    Family(
        "prompt_tokens_total",
        "counter",
        "Prompt tokens by where their KV cache came from.",
        (*_REPLICA, "source"),
    ),
    Family(
        "prefill_tokens_per_second",
        "gauge",
        "How fast the engine computes prompts, measured as it does.",
        _REPLICA,
    ),
    Family(
        "saved_seconds",
        "gauge",
        "Time that prompt tokens from pool and peers would have taken at the measured speed.",
        _REPLICA,
    ),
    Family(
        "longest_scheduling_wait_seconds",
        "gauge",
        "The longest time that a request waited for a fetch to be decided.",
        _REPLICA,
    ),
    Family(
        "fetches_total",
        "counter",
        "Fetches that have ended; rolled back means that not all of the chunks became hits.",
        (*_REPLICA, "transport", "outcome", "reason"),
    ),
    Family(
        "fetch_duration_seconds",
        "histogram",
        "Time from the decision to fetch until the fetch was committed or rolled back.",
        (*_REPLICA, "transport", "outcome"),
    ),
    Family(
        "fetch_size_bytes",
        "histogram",
        "What fetches brought, of those that brought anything.",
        (*_REPLICA, "transport"),
    ),
    Family(
        "received_bytes_total",
        "counter",
        "Bytes of chunks from peers that became hits.",
        (*_REPLICA, "transport"),
    ),
    Family(
        "sent_bytes_total",
        "counter",
        "Bytes of chunks that the replica's transfer process has sent to peers.",
        _REPLICA,
    ),
    Family(
        "fetch_decisions_total",
        "counter",
        "Prefixes that peers held, by whether they were fetched or were quicker computed.",
        (*_REPLICA, "way"),
    ),
    Family(
        "fetches_slower_than_prefill_total",
        "counter",
        "Fetches that took longer than computing was expected to take.",
        _REPLICA,
    ),
    Family(
        "predicted_fetch_seconds_total",
        "counter",
        "Time that fetches took of which a forecast was made.",
        _REPLICA,
    ),
    Family(
        "fetch_prediction_error_seconds_total",
        "counter",
        "By how much the predictions of these were wrong, in either direction.",
        _REPLICA,
    ),
    Family(
        "claimed_prefixes_total",
        "counter",
        "Long prefixes that the replica computed, and that peers could wait for.",
        _REPLICA,
    ),
    Family(
        "waits_total",
        "counter",
        "Requests that waited for a peer to compute their prefix, by how that ended.",
        (*_REPLICA, "outcome"),
    ),
    Family(
        "wait_seconds_total",
        "counter",
        "Time that these requests waited.",
        _REPLICA,
    ),
    Family("fetching_chunks", "gauge", "Chunks that are on their way.", _REPLICA),
    Family("grants", "gauge", "Promises to peers that are in force.", _REPLICA),
    Family("grants_refused_total", "counter", "Requests of peers that were refused.", _REPLICA),
    Family(
        "pool_bytes",
        "gauge",
        "The pool's memory by what it is used for; together, its size.",
        (*_REPLICA, "state"),
    ),
    Family(
        "pool_pinned_bytes",
        "gauge",
        "The part of the pool's ready memory that cannot be evicted now.",
        _REPLICA,
    ),
    Family("published_chunks", "gauge", "Chunks that the replica offers to peers.", _REPLICA),
    Family("mirrored_chunks", "gauge", "Chunks that the replica knows peers to hold.", _REPLICA),
    Family(
        "mirror_dropped_chunks_total",
        "counter",
        "Chunks of peers that the replica had no room to know of.",
        _REPLICA,
    ),
    Family(
        "transfer_restarts_total",
        "counter",
        "Times that the replica's transfer process was started again.",
        _REPLICA,
    ),
    Family(
        "backlog_refused_total",
        "counter",
        "Stores, claims and fetches given up because the background thread was behind.",
        _REPLICA,
    ),
)


def samples(reports: Mapping[str, Mapping[str, Any] | None], *, up: bool, failures: int) -> Samples:
    """`reports` are those of all models that share, None of one whose tracker did not answer."""
    found: Samples = {family.name: [] for family in FAMILIES}
    found["up"].append(({}, int(up)))
    found["scrape_failures_total"].append(({}, failures))
    for model, report in reports.items():
        for name, sample in _of_model({"model": model}, report):
            found[name].append(sample)
    return found


def _of_model(model: Labels, report: Mapping[str, Any] | None) -> Iterator[tuple[str, Sample]]:
    yield "tracker_up", (model, int(report is not None))
    if report is None:
        return
    replicas = report["replicas"]
    yield "enabled", (model, int(report["enabled"]))
    yield "replicas", (model, len(replicas))
    yield "namespaces", (model, len({replica["namespace"] for replica in replicas}))
    for name, replica in _named(replicas):
        labels = {**model, "replica": name}
        for family, more, value in _of_replica(replica):
            yield family, ({**labels, **more}, value)


def _named(replicas: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each with a name of its own.

    An engine that was started again keeps its name, and for some seconds the one before it is still
    a member: one that does not answer gives way. Engines of one data-parallel replica have one
    name.
    """
    by_name = sorted(replicas, key=_name)
    for name, same in itertools.groupby(by_name, key=_name):
        group = sorted(same, key=lambda replica: str(replica["incarnation"]))
        fresh = [replica for replica in group if not replica["stale"]] or group[:1]
        for position, replica in enumerate(fresh, 1):
            yield (name if position == 1 else f"{name}/{position}"), replica


def _name(replica: Mapping[str, Any]) -> str:
    return str(replica["replica"])


_Value = tuple[str, Labels, float | HistogramValue]


def _of_replica(replica: Mapping[str, Any]) -> Iterator[_Value]:
    yield "replica_up", {}, int(not replica["stale"])
    pool = mapping(replica["pool"])
    if not pool:  # it has not said anything yet; zeros would look like a new start
        return
    reason = replica.get("not_sharing")
    yield "sharing", {"reason": _known(reason, NOT_SHARING) if reason else ""}, int(not reason)
    for source in HIT_SOURCES:
        tokens = number(mapping(replica["hits"]).get(source))
        yield "prompt_tokens_total", {"source": source}, tokens
    for way in ("fetched", "computed"):
        yield "fetch_decisions_total", {"way": way}, number(_cost_model(replica).get(way))
    waited, given_up = (number(_waits(replica).get(name)) for name in ("waited", "given_up"))
    yield "waits_total", {"outcome": "arrived"}, max(0, waited - given_up)
    yield "waits_total", {"outcome": "given_up"}, given_up
    for name, read in _SINGLE.items():
        yield name, {}, number(read(replica))
    if replica["prefill_tokens_per_s"] is not None:
        yield "prefill_tokens_per_second", {}, number(replica["prefill_tokens_per_s"])
    if "transport" in replica:  # else no transfer process has told how much it sent
        yield "sent_bytes_total", {}, number(replica["bytes_sent"])
    yield from _of_pool(pool)
    transports = mapping(mapping(replica["fetches"]).get("by_transport"))
    for transport in sorted(transports)[:_MAX_TRANSPORTS]:
        labels = {"transport": str(transport)[:_MAX_NAME]}
        yield from _of_transport(labels, mapping(transports[transport]))


def _cost_model(replica: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(replica.get("fetch_decisions"))


def _waits(replica: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(replica.get("waits"))


_SINGLE: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "requests_total": lambda replica: replica["requests"],
    "saved_seconds": lambda replica: replica["seconds_saved"],
    "longest_scheduling_wait_seconds": lambda replica: replica.get("longest_scheduling_wait_s"),
    "fetches_slower_than_prefill_total": lambda replica: _cost_model(replica).get(
        "slower_than_prefill"
    ),
    "predicted_fetch_seconds_total": lambda replica: _cost_model(replica).get("actual_s"),
    "fetch_prediction_error_seconds_total": lambda replica: _cost_model(replica).get("error_s"),
    "claimed_prefixes_total": lambda replica: _waits(replica).get("claimed"),
    "wait_seconds_total": lambda replica: _waits(replica).get("seconds"),
    "fetching_chunks": lambda replica: sum(map(number, mapping(replica["fetching"]).values())),
    "grants": lambda replica: mapping(replica.get("grants")).get("live"),
    "grants_refused_total": lambda replica: mapping(replica.get("grants")).get("refused"),
    "published_chunks": lambda replica: replica["holdings"],
    "mirrored_chunks": lambda replica: mapping(replica.get("mirror")).get("keys"),
    "mirror_dropped_chunks_total": lambda replica: mapping(replica.get("mirror")).get("dropped"),
    "transfer_restarts_total": lambda replica: replica.get("transfer_restarts"),
    "backlog_refused_total": lambda replica: replica.get("refused_posts"),
}


def _of_pool(pool: Mapping[str, Any]) -> Iterator[_Value]:
    row_bytes = number(pool.get("row_bytes"))
    rows = {state: number(pool.get(state)) for state in ("ready", "filling", "quarantined")}
    rows["free"] = max(0, number(pool.get("rows")) - sum(rows.values()))
    for state, count in rows.items():
        yield "pool_bytes", {"state": state}, count * row_bytes
    yield "pool_pinned_bytes", {}, number(pool.get("pinned")) * row_bytes


def _of_transport(transport: Labels, figures: Mapping[str, Any]) -> Iterator[_Value]:
    for outcome in OUTCOMES:
        seconds = _histogram(mapping(figures.get("seconds")).get(outcome), SECONDS_BOUNDS)
        if seconds is not None:
            labels = {**transport, "outcome": outcome}
            yield "fetch_duration_seconds", labels, seconds
            if outcome == "committed":
                yield "fetches_total", {**labels, "reason": ""}, seconds["count"]
    counts = dict.fromkeys((*ROLLBACKS, OTHER), 0.0)
    for reason, count in mapping(figures.get("reasons")).items():
        counts[_known(reason, ROLLBACKS)] += number(count)
    for reason, total in counts.items():
        if total:
            labels = {**transport, "outcome": "rolled_back", "reason": reason}
            yield "fetches_total", labels, total
    size = _histogram(figures.get("bytes"), BYTES_BOUNDS)
    if size is not None:
        yield "fetch_size_bytes", transport, size
        yield "received_bytes_total", transport, size["sum"]


def _histogram(value: object, bounds: tuple[float, ...]) -> HistogramValue | None:
    """None for one that is none, or has other buckets."""
    counts = mapping(value).get("counts")
    if not isinstance(counts, list) or len(counts) != len(bounds) + 1:
        return None
    cumulative = list(itertools.accumulate(map(number, counts)))
    total: HistogramValue = dict(zip((*bounds, math.inf), cumulative, strict=True))
    return {**total, "sum": number(mapping(value).get("sum")), "count": cumulative[-1]}


def _known(value: object, values: Sequence[str]) -> str:
    return value if isinstance(value, str) and value in values else OTHER
