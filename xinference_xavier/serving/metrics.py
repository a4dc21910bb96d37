"""Sharing as Prometheus sees it, on xinference's own `/metrics`, current at each scrape.

`stats.schema` declares the metrics that are one field of a report; the others are declared here.
Replicas count since their start, so every process that answers a scrape shows the same values.
Models and replicas bound the number of series: every other label has few values, and a value that
a peer makes up becomes "other".

xinference renders an aioprometheus registry synchronously, but replicas in other processes have the
values. So a scrape first passes `FreshMetrics`, which asks for reports. The registry's collectors
then read the samples of those that arrived by the deadline.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

from aioprometheus import collectors
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from xinference_xavier._version import __version__
from xinference_xavier.errors import ROLLBACKS, NotFoundError, NotSharing
from xinference_xavier.protocol.tracker import without_rank
from xinference_xavier.runtime.aio import within
from xinference_xavier.runtime.host import installed_version
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.serving import seam
from xinference_xavier.serving.gateway import TrackerGateway
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import (
    CHOICES,
    COMMITTED,
    OUTCOMES,
    PREFIX_STATES,
    ROLLED_BACK,
    FetchStats,
    Histogram,
    ModelStatus,
    Predictions,
    ReplicaStatus,
    RoutingStats,
    TrackerStats,
)

PREFIX = "xinference:xavier_"
OTHER = "other"
_MAX_TRANSPORTS = 8  # of one replica
_MAX_VERSIONS = 8  # of vLLM
_MAX_NAME = 64  # characters of a transport's or a version's
NO_WORKERS: Mapping[str, Mapping[str, str]] = {}
_BUILT = {"version": __version__, "xinference": installed_version("xinference") or ""}

Labels = dict[str, str]
HistogramValue = dict[float | str, float]
"""Cumulative counts by upper bound, and "sum" and "count"."""
Value = float | HistogramValue
Sample = tuple[Labels, Value]
Samples = dict[str, list[Sample]]
"""Samples by a family's name without the prefix."""
_ByLabels = Mapping[tuple[str, ...], Value]


class Family(NamedTuple):
    """`read` takes a model or a replica. It returns a value, None for no sample, or the values by
    the family's own labels, those that come after its model's or its replica's."""

    name: str  # without the prefix
    help: str
    labels: tuple[str, ...] = ()
    read: Callable[[Any], float | _ByLabels | None] = lambda source: None
    is_histogram: bool = False

    @property
    def kind(self) -> str:
        if self.is_histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    def samples(self, source: object, labels: Labels) -> Iterator[Sample]:
        value = self.read(source)
        if isinstance(value, Mapping):
            own = self.labels[len(labels) :]
            for names, part in value.items():
                yield {**labels, **dict(zip(own, names, strict=True))}, part
        elif value is not None:
            yield labels, value


def _routing(model: ModelStatus) -> _ByLabels:
    mode = model.routing.mode
    return {(mode,): int(mode not in ("", "off"))}


def _choices(model: ModelStatus) -> _ByLabels:
    return {(reason,): model.routing.choices.get(reason, 0) for reason in CHOICES}


def _routed(model: ModelStatus) -> _ByLabels:
    counts = {**dict.fromkeys(model.routing.loads, 0), **model.routing.replicas}
    return _by_engine(model, counts)


def _backlogs(model: ModelStatus) -> _ByLabels:
    return _by_engine(model, {name: each.backlog_s for name, each in model.routing.loads.items()})


def _by_engine(model: ModelStatus, values: Mapping[str, float]) -> _ByLabels:
    return {_engine(model.model_uid, name): value for name, value in values.items()}


def _engine(model_uid: str, name: str) -> tuple[str, str]:
    """`replica_index` and `dp_rank` of the engine that has this name."""
    replica = without_rank(name)
    rank = name.removeprefix(replica).removeprefix("_dp")
    return seam.replica_index(model_uid, replica), rank


def _predictions(which: str, model: ModelStatus) -> _ByLabels:
    routing, none = model.routing, Predictions()
    known = {each: routing.first_bytes.get(each, none) for each in CHOICES}
    known["decode"] = routing.decodes
    return {(term,): _cumulative(getattr(each, which)) for term, each in known.items()}


def _prefixes(model: ModelStatus) -> _ByLabels:
    return {(state,): model.prefix_states.get(state, 0) for state in PREFIX_STATES}


def _sharing(replica: ReplicaStatus) -> _ByLabels:
    reason = replica.not_sharing
    return {(_known(reason, tuple(NotSharing)) if reason else "",): int(not reason)}


def _pool_bytes(replica: ReplicaStatus) -> _ByLabels:
    pool = replica.pool
    rows = {"ready": pool.ready, "filling": pool.filling, "quarantined": pool.quarantined}
    rows["free"] = max(0, pool.rows - sum(rows.values()))
    return {(state,): count * pool.row_bytes for state, count in rows.items()}


def _waits(replica: ReplicaStatus) -> _ByLabels:
    waits = replica.waits
    return {("arrived",): max(0, waits.waited - waits.given_up), ("given_up",): waits.given_up}


def _fetches(replica: ReplicaStatus) -> _ByLabels:
    fetches: dict[tuple[str, ...], float] = {
        (transport, outcome, ""): seconds["count"]
        for (transport, outcome), seconds in _durations(replica).items()
        if outcome == COMMITTED
    }
    for transport, stats in _transports(replica):
        for reason, count in stats.reasons.items():
            labels = (transport, ROLLED_BACK, _known(reason, ROLLBACKS))
            fetches[labels] = fetches.get(labels, 0) + count
    return fetches


def _durations(replica: ReplicaStatus) -> dict[tuple[str, ...], HistogramValue]:
    return {
        (transport, outcome): _cumulative(stats.seconds[outcome])
        for transport, stats in _transports(replica)
        for outcome in OUTCOMES
        if outcome in stats.seconds
    }


def _sizes(replica: ReplicaStatus) -> dict[tuple[str, ...], HistogramValue]:
    return {(transport,): _cumulative(stats.bytes) for transport, stats in _transports(replica)}


def _first_tokens(replica: ReplicaStatus) -> _ByLabels:
    return {(source,): _cumulative(each) for source, each in vars(replica.first_tokens).items()}


def _transports(replica: ReplicaStatus) -> Iterator[tuple[str, FetchStats]]:
    by_transport = replica.fetches.by_transport
    for name in sorted(by_transport)[:_MAX_TRANSPORTS]:
        yield name[:_MAX_NAME], by_transport[name]


def _cumulative(histogram: Histogram) -> HistogramValue:
    cumulative = list(itertools.accumulate(histogram.counts))
    buckets: HistogramValue = dict(zip((*histogram.bounds, math.inf), cumulative, strict=True))
    return {**buckets, "sum": histogram.sum, "count": cumulative[-1]}


def _known(value: str, values: Sequence[str]) -> str:
    return value if value in values else OTHER


def _declared(kind: type[Any], labels: tuple[str, ...], *path: str) -> Iterator[Family]:
    """What the schema declares for the fields of `kind`, an object of which is at `path`."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        shown, where = field.metadata, (*path, field.name)
        if "metric" in shown:
            own = (shown["label"],) if shown["label"] else ()
            read_field = partial(_read_field, ".".join(where))
            yield Family(shown["metric"], shown["description"], (*labels, *own), read_field)
        elif is_dataclass(hints[field.name]):
            yield from _declared(hints[field.name], labels, *where)


def _read_field(path: str, source: object) -> float | _ByLabels | None:
    value = attrgetter(path)(source)
    if is_dataclass(value):
        return {(name,): part for name, part in vars(value).items()}
    return sum(value.values()) if isinstance(value, dict) else value


_MODEL = ("model_uid",)
_ENGINE = (*_MODEL, "replica_index", "dp_rank")
_REPLICA = (*_ENGINE, "worker_address")

_BUILD = Family(
    "build_info",
    "Always 1, for each vLLM that replicas run, with the versions of extension and xinference.",
    ("version", "xinference", "vllm"),
)
_UP = Family("up", "Whether the supervisor said in time which models share.")
_FAILURES = Family(
    "scrape_failures_total",
    "Answers of the supervisor or a tracker that did not arrive in time for a scrape.",
)
_TRACKER_UP = Family("tracker_up", "Whether the model's tracker answered in time.", _MODEL)
_OF_MODEL = (
    Family("enabled", "Whether sharing is switched on.", _MODEL, lambda model: int(model.enabled)),
    Family(
        "replicas",
        "Replicas that are members of the tracker.",
        _MODEL,
        lambda model: len(model.replicas),
    ),
    Family(
        "namespaces",
        "Groups of replicas that share only among themselves; there should be one.",
        _MODEL,
        lambda model: len({replica.namespace for replica in model.replicas}),
    ),
    *_declared(TrackerStats, _MODEL, "tracker"),
    Family(
        "routing", "Whether requests are routed, and in which way.", (*_MODEL, "mode"), _routing
    ),
    Family(
        "routable_replicas",
        "Replicas whose load is known, so that requests can be routed to them.",
        _MODEL,
        lambda model: len(model.routing.loads),
    ),
    Family(
        "routing_choices_total",
        "Routed requests by the reason for which their replica was chosen.",
        (*_MODEL, "reason"),
        _choices,
    ),
    Family("routed_requests_total", "Routed requests by replica.", _ENGINE, _routed),
    Family(
        "prefill_backlog_seconds",
        "Prefill that the replica still has to do, as the process that routes expects it.",
        _ENGINE,
        _backlogs,
    ),
    *_declared(RoutingStats, _MODEL, "routing"),
    Family(
        "routing_predicted_seconds",
        "Predicted time until the first byte of streamed answers, by the reason of the choice; "
        "`decode` is the time from there to the last.",
        (*_MODEL, "reason"),
        partial(_predictions, "predicted"),
        is_histogram=True,
    ),
    Family(
        "routing_actual_seconds",
        "These times as they were.",
        (*_MODEL, "reason"),
        partial(_predictions, "actual"),
        is_histogram=True,
    ),
    Family(
        "routing_prediction_error_seconds",
        "Absolute error of these predictions.",
        (*_MODEL, "reason"),
        partial(_predictions, "error"),
        is_histogram=True,
    ),
    Family("named_prefixes", "Named prefixes by state.", (*_MODEL, "state"), _prefixes),
    Family(
        "prefix_file_failures_total",
        "Failed attempts to read or write the file of all models' names; they are repeated.",
        _MODEL,
        lambda model: model.prefix_file_failures,
    ),
)
_REPLICA_UP = Family(
    "replica_up",
    "Whether the replica answered in time; if not, its values are from its last heartbeat.",
    _REPLICA,
    lambda replica: int(not replica.stale),
)
_OF_REPLICA = (
    Family(
        "sharing",
        "Whether the replica can fetch from a peer, and the reason if it cannot.",
        (*_REPLICA, "reason"),
        _sharing,
    ),
    Family(
        "time_to_first_token_seconds",
        "Time from a request's arrival to its first token, by the source of most of its prompt.",
        (*_REPLICA, "source"),
        _first_tokens,
        is_histogram=True,
    ),
    Family(
        "fetches_total",
        "Finished fetches; rolled_back means that not all of the chunks became hits.",
        (*_REPLICA, "transport", "outcome", "reason"),
        _fetches,
    ),
    Family(
        "fetch_duration_seconds",
        "Time from the decision to fetch until the fetch was committed or rolled back.",
        (*_REPLICA, "transport", "outcome"),
        _durations,
        is_histogram=True,
    ),
    Family(
        "fetch_size_bytes",
        "Bytes per fetch, of those that brought any.",
        (*_REPLICA, "transport"),
        _sizes,
        is_histogram=True,
    ),
    Family(
        "received_bytes_total",
        "Bytes of chunks from peers and the disk that became hits.",
        (*_REPLICA, "transport"),
        lambda replica: {labels: size["sum"] for labels, size in _sizes(replica).items()},
    ),
    Family(
        "sent_bytes_total",
        "Bytes of chunks that the replica's transfer process sent to peers.",
        _REPLICA,
        # Without an answer from the transfer process this is unknown, not zero.
        lambda replica: None if replica.transport is None else replica.bytes_sent,
    ),
    Family(
        "fetch_decisions_total",
        "Prefixes that peers held, by whether fetching or computing them was chosen.",
        (*_REPLICA, "way"),
        lambda replica: {
            ("fetched",): replica.fetch_decisions.fetched,
            ("computed",): replica.fetch_decisions.computed,
        },
    ),
    Family(
        "left_out_peers",
        "Peers that the replica does not fetch from for now, because fetches from them failed.",
        _REPLICA,
        lambda replica: len(replica.fetch_decisions.left_out),
    ),
    Family(
        "waits_total",
        "Requests that waited for a peer to compute their prefix, by how the wait ended.",
        (*_REPLICA, "outcome"),
        _waits,
    ),
    Family(
        "pool_bytes",
        "The pool's memory by state; the states add up to its size.",
        (*_REPLICA, "state"),
        _pool_bytes,
    ),
    Family(
        "pool_pinned_bytes",
        "The part of the pool's ready memory that cannot be evicted now.",
        _REPLICA,
        lambda replica: replica.pool.pinned * replica.pool.row_bytes,
    ),
    *_declared(ReplicaStatus, _REPLICA),
)
FAMILIES = (_BUILD, _UP, _FAILURES, _TRACKER_UP, *_OF_MODEL, _REPLICA_UP, *_OF_REPLICA)


def samples(
    reports: Mapping[str, Mapping[str, Any] | None],
    *,
    up: bool,
    failures: int,
    workers: Mapping[str, Mapping[str, str]] = NO_WORKERS,
) -> Samples:
    """`reports` are by model, None for a model whose tracker did not answer; `workers` has the
    addresses of each model's workers by replica."""
    shown: Samples = {family.name: [] for family in FAMILIES}

    def show(families: Iterable[Family], source: object, **labels: str) -> None:
        for family in families:
            shown[family.name] += family.samples(source, labels)

    versions: set[str] = set()
    shown[_UP.name] = [({}, int(up))]
    shown[_FAILURES.name] = [({}, failures)]
    for uid, report in reports.items():
        shown[_TRACKER_UP.name].append(({"model_uid": uid}, int(report is not None)))
        if report is None:
            continue
        model = read(ModelStatus, report)
        show(_OF_MODEL, model, model_uid=uid)
        versions |= {replica.vllm[:_MAX_NAME] for replica in model.replicas if replica.vllm}
        for name, replica in _named(model.replicas):
            worker = workers.get(uid, {}).get(without_rank(name), "")
            labels = dict(zip(_REPLICA, (uid, *_engine(uid, name), worker), strict=True))
            show([_REPLICA_UP], replica, **labels)
            if replica.pool.rows:  # zeros of one that has not reported would look like a restart
                show(_OF_REPLICA, replica, **labels)
    for vllm in sorted(versions)[:_MAX_VERSIONS] or [""]:
        shown[_BUILD.name].append(({**_BUILT, "vllm": vllm}, 1))
    return shown


def _named(replicas: Sequence[ReplicaStatus]) -> Iterator[tuple[str, ReplicaStatus]]:
    """Give each replica a name of its own.

    A restarted engine has the name of its predecessor, which stays a member for some seconds: the
    one that does not answer is left out. Without xinference, several may have been given one name.
    """
    by_name = sorted(replicas, key=lambda replica: (replica.replica, replica.incarnation))
    for name, same in itertools.groupby(by_name, key=lambda replica: replica.replica):
        group = list(same)
        fresh = [replica for replica in group if not replica.stale] or group[:1]
        for position, replica in enumerate(fresh, 1):
            yield (name if position == 1 else f"{name}/{position}"), replica


logger = logging.getLogger(__name__)

MAX_SECONDS = 3.0
"""Seconds for all answers together, at most half of the scrape's own time limit; and for what is
made of them."""
MAX_AGE = 1.0
"""Seconds: scrapes that are closer together share a report."""
_PATH = "/metrics"
_SCRAPE_TIMEOUT = "x-prometheus-scrape-timeout-seconds"
_KINDS = {
    "counter": collectors.Counter,
    "gauge": collectors.Gauge,
    "histogram": collectors.Histogram,
}


def add_metrics(context: Any, trackers: TrackerGateway) -> None:
    """`context` is xinference's APIExtensionContext."""
    exporter = Exporter(trackers)
    exporter.register(seam.metrics_registry(context.app, collectors.REGISTRY))
    seam.add_middleware(context.app, FreshMetrics, exporter=exporter)


class FreshMetrics:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, exporter: "Exporter") -> None:
        self._app = app
        self._exporter = exporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"].removeprefix(scope.get("root_path", "")) == _PATH
        ):
            await self._exporter.refresh(_deadline(Headers(scope=scope).get(_SCRAPE_TIMEOUT, "")))
        await self._app(scope, receive, send)


def _deadline(scrape_timeout: str) -> float:
    try:
        return max(0.0, min(MAX_SECONDS, float(scrape_timeout) / 2))
    except ValueError:  # only Prometheus sends the header
        return MAX_SECONDS


class Exporter:
    """Holds the samples of the last scrape."""

    def __init__(self, trackers: TrackerGateway) -> None:
        self._trackers = trackers
        self._log = RateLimitedLog(logger)
        self._failures = 0
        self._samples = samples({}, up=False, failures=0)

    def register(self, registry: Any) -> None:
        """Replaces collectors of an earlier exporter: an API may restart within its process."""
        for family in FAMILIES:
            name = f"{PREFIX}{family.name}"
            if name in registry.collectors:
                registry.deregister(name)
            collector: Any = _KINDS[family.kind](name, family.help, registry=registry)
            collector.get_all = partial(self.read, family.name)  # it has no values of its own

    def read(self, name: str) -> list[Sample]:
        return [(_escaped(labels), value) for labels, value in self._samples[name]]

    async def refresh(self, seconds: float) -> None:
        """Wait for reports for at most `seconds`; never raises. Missing ones are left out."""
        deadline = time.monotonic() + seconds
        try:
            models = await within(seconds, self._trackers.models())
        except Exception as error:  # a supervisor without this extension may raise anything
            self._fail("supervisor", error)
            self._samples = samples({}, up=False, failures=self._failures)
            return
        answers = await asyncio.gather(*(self._report(model, deadline) for model in models))
        reports = dict(filter(None, answers))
        making = partial(samples, reports, up=True, failures=self._failures, workers=models)
        try:
            self._samples = await within(MAX_SECONDS, asyncio.to_thread(making))
        except Exception as error:  # our own: xinference's metrics are there all the same
            self._fail("API", error)
            self._samples = samples({}, up=True, failures=self._failures)

    async def _report(
        self, model: str, deadline: float
    ) -> tuple[str, dict[str, Any] | None] | None:
        """The model with its report; None if it has ended meanwhile."""
        reading = self._trackers.shared_report(model, MAX_AGE)
        try:
            return model, (await within(deadline - time.monotonic(), reading)).public
        except NotFoundError:
            return None
        except Exception as error:
            self._fail(f"tracker of {model}", error)
            return model, None

    def _fail(self, process: str, error: Exception) -> None:
        self._failures += 1
        self._log.warn(process, "no answer to a scrape: process=%s error=%r", process, error)


def _escaped(labels: Labels) -> Labels:
    """aioprometheus does not escape label values."""
    return {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in labels.items()
    }
