"""Sharing as Prometheus sees it, on xinference's own `/metrics`, current at each scrape.

`stats.schema` declares the metrics. Replicas count since their start, so every process that answers
a scrape shows the same values. Models and replicas bound the number of series: every other label
has few values.

xinference renders an aioprometheus registry synchronously, but replicas in other processes have the
values. So a scrape first passes `FreshMetrics`, which asks for reports. The registry's collectors
then read the samples of those that arrived by the deadline.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from aioprometheus import collectors
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from xinference_xavier._version import __version__
from xinference_xavier.errors import NotFoundError
from xinference_xavier.protocol.tracker import without_rank
from xinference_xavier.runtime.aio import in_thread, within
from xinference_xavier.runtime.host import installed_version
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.serving import seam
from xinference_xavier.serving.gateway import TrackerGateway
from xinference_xavier.stats import schema
from xinference_xavier.stats.report import read
from xinference_xavier.stats.schema import (
    MAX_NAME,
    REPLICA,
    Figure,
    Histogram,
    ModelStatus,
    ReplicaStatus,
)

PREFIX = "xinference:xavier_"
_MAX_VERSIONS = 8  # of vLLM
NO_WORKERS: Mapping[str, Mapping[str, str]] = {}
_BUILT = {"version": __version__, "xinference": installed_version("xinference") or ""}

Labels = dict[str, str]
HistogramValue = dict[float | str, float]
"""Cumulative counts by upper bound, and "sum" and "count"."""
Value = float | HistogramValue
Sample = tuple[Labels, Value]
Samples = dict[str, list[Sample]]
"""Samples by a metric's name without the prefix."""

_MODEL = ("model_uid",)
_ENGINE = ("replica_index", "dp_rank")
_REPLICA = (*_MODEL, *_ENGINE, "worker_address")


class Family(NamedTuple):
    """A figure as a metric; `owner` are the labels of what has the figure."""

    figure: Figure
    owner: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.figure.metric

    @property
    def labels(self) -> tuple[str, ...]:
        names = ((_ENGINE if name == REPLICA else (name,)) for name in self.figure.labels)
        return (*self.owner, *itertools.chain(*names))

    def samples(self, source: object, labels: Labels) -> Iterator[Sample]:
        own = self.labels[len(self.owner) :]
        for values, value in self.figure.values(source).items():
            if self.figure.labels == (REPLICA,):
                values = _engine(labels["model_uid"], *values)
            shown = _cumulative(value) if isinstance(value, Histogram) else value
            yield {**labels, **dict(zip(own, values, strict=True))}, shown


def _engine(model_uid: str, name: str) -> tuple[str, str]:
    """`replica_index` and `dp_rank` of the engine that has this name."""
    replica = without_rank(name)
    rank = name.removeprefix(replica).removeprefix("_dp")
    return seam.replica_index(model_uid, replica), rank


def _cumulative(histogram: Histogram) -> HistogramValue:
    cumulative = list(itertools.accumulate(histogram.counts))
    buckets: HistogramValue = dict(zip((*histogram.bounds, math.inf), cumulative, strict=True))
    return {**buckets, "sum": histogram.sum, "count": cumulative[-1]}


def _metrics(figures: Iterable[Figure], *owner: str) -> tuple[Family, ...]:
    return tuple(Family(each, owner) for each in figures if each.metric)


_BUILD, _UP = _metrics([schema.BUILD, schema.UP])
(_TRACKER_UP,) = _metrics([schema.TRACKER_UP], *_MODEL)
(_REPLICA_UP,) = _metrics([schema.REPLICA_UP], *_REPLICA)
_OF_REPLICA = _metrics(schema.OF_REPLICA, *_REPLICA)
_OF_MODEL = _metrics(schema.OF_MODEL, *_MODEL)
FAMILIES = (*_OF_REPLICA, *_OF_MODEL, _REPLICA_UP, _TRACKER_UP, _UP, _BUILD)


def samples(
    reports: Mapping[str, Mapping[str, Any] | None],
    *,
    up: bool,
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
    for uid, report in reports.items():
        shown[_TRACKER_UP.name].append(({"model_uid": uid}, int(report is not None)))
        if report is None:
            continue
        model = read(ModelStatus, report)
        show(_OF_MODEL, model, model_uid=uid)
        versions |= {replica.vllm[:MAX_NAME] for replica in model.replicas if replica.vllm}
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
        self._samples = samples({}, up=False)

    def register(self, registry: Any) -> None:
        """Replaces collectors of an earlier exporter: an API may restart within its process."""
        for family in FAMILIES:
            name = f"{PREFIX}{family.name}"
            if name in registry.collectors:
                registry.deregister(name)
            kind = _KINDS[family.figure.kind]
            collector: Any = kind(name, family.figure.text, registry=registry)
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
            self._samples = samples({}, up=False)
            return
        answers = await asyncio.gather(*(self._report(model, deadline) for model in models))
        reports = dict(filter(None, answers))
        making = partial(samples, reports, up=True, workers=models)
        try:
            self._samples = await within(MAX_SECONDS, in_thread(making))
        except Exception as error:  # our own: xinference's metrics are there all the same
            self._fail("API", error)
            self._samples = samples({}, up=True)

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
        self._log.warn(process, "no answer to a scrape: process=%s error=%r", process, error)


def _escaped(labels: Labels) -> Labels:
    """aioprometheus does not escape label values."""
    return {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in labels.items()
    }
