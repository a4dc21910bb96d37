"""Our metrics on xinference's own `/metrics`, current at each scrape.

xinference renders an aioprometheus registry synchronously, but replicas in other processes have the
values. So a scrape first passes `FreshMetrics`, which asks for reports. The registry's collectors
then read the samples of those that arrived by the deadline.
"""

import asyncio
import logging
import time
from functools import partial
from typing import Any

from aioprometheus.collectors import REGISTRY, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from xinference_xavier.errors import NotFoundError
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.serving.answers import add_middleware
from xinference_xavier.serving.prometheus.families import (
    FAMILIES,
    PREFIX,
    Labels,
    Sample,
    samples,
)
from xinference_xavier.serving.tracker_gateway import TrackerGateway

logger = logging.getLogger(__name__)

MAX_SECONDS = 3.0
"""Seconds for all answers together; at most half of the scrape's own time limit."""
MAX_AGE = 1.0
"""Seconds: scrapes that are closer together share a report."""
_PATH = "/metrics"
_SCRAPE_TIMEOUT = "x-prometheus-scrape-timeout-seconds"
_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


def add_metrics(context: Any, trackers: TrackerGateway) -> None:
    """`context` is xinference's APIExtensionContext."""
    exporter = Exporter(trackers)
    # The registry of xinference's own endpoint.
    exporter.register(getattr(context.app.state, "registry", REGISTRY))
    add_middleware(context, FreshMetrics, exporter=exporter)


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
        self._samples = samples(dict(filter(None, answers)), up=True, failures=self._failures)

    async def _report(
        self, model: str, deadline: float
    ) -> tuple[str, dict[str, Any] | None] | None:
        """The model with its report; None if it has ended meanwhile."""
        reading = self._trackers.shared_report(model, MAX_AGE)
        try:
            return model, await within(deadline - time.monotonic(), reading)
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
