"""Our metrics on xinference's own `/metrics`, as of the moment of each scrape.

xinference renders a registry of aioprometheus, synchronously, while the values are with replicas in
other processes. So a scrape first passes `FreshMetrics`, which asks for them and puts what it got
by a deadline where the registry's collectors find it.

Threading: all on the API's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from aioprometheus.collectors import REGISTRY, Counter, Gauge, Histogram
from starlette.datastructures import Headers

from xinference_xavier.errors import NotFoundError
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.serving.prometheus.families import (
    FAMILIES,
    PREFIX,
    Family,
    Labels,
    Sample,
    samples,
)
from xinference_xavier.serving.tracker_gateway import TrackerGateway

logger = logging.getLogger(__name__)

MAX_SECONDS = 3.0
"""For all answers together; less if the scrape itself may not take twice as long."""
MAX_AGE = 1.0
"""Seconds: two who scrape share one report."""
_PATH = "/metrics"
_SCRAPE_TIMEOUT = "x-prometheus-scrape-timeout-seconds"

_Asgi = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


def add_metrics(context: Any) -> None:
    """``context`` is xinference's APIExtensionContext."""
    exporter = Exporter(TrackerGateway(context.get_supervisor_ref))
    # Where xinference's own endpoint looks, too.
    exporter.register(getattr(context.app.state, "registry", REGISTRY))
    context.app.add_middleware(FreshMetrics, exporter=exporter)


class FreshMetrics:
    """ASGI middleware."""

    def __init__(self, app: _Asgi, exporter: Exporter) -> None:
        self._app = app
        self._exporter = exporter

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if (
            scope["type"] == "http"
            and scope["path"].removeprefix(scope.get("root_path", "")) == _PATH
        ):
            await self._exporter.refresh(_deadline(Headers(scope=scope).get(_SCRAPE_TIMEOUT, "")))
        await self._app(scope, receive, send)


def _deadline(scrape_timeout: str) -> float:
    try:
        return max(0.0, min(MAX_SECONDS, float(scrape_timeout) / 2))
    except ValueError:  # no scraper of ours says it
        return MAX_SECONDS


class Exporter:
    """What the last scrape found."""

    def __init__(self, trackers: TrackerGateway) -> None:
        self._trackers = trackers
        self._conditions = RateLimitedLog(logger)
        self._failures = 0
        self._samples = samples({}, up=False, failures=0)

    def register(self, registry: Any) -> None:
        """Once more does no harm: an API that is started anew in its process has a new exporter."""
        for family in FAMILIES:
            if f"{PREFIX}{family.name}" in registry.collectors:
                registry.deregister(f"{PREFIX}{family.name}")
            _KINDS[family.kind](family, self.read, registry)

    def read(self, name: str) -> list[Sample]:
        return [(_escaped(labels), value) for labels, value in self._samples[name]]

    async def refresh(self, seconds: float) -> None:
        """Takes no longer than that, and never raises: what does not answer is not there."""
        deadline = time.monotonic() + seconds
        try:
            models = await within(seconds, self._trackers.models())
        except Exception as error:  # a supervisor without our part raises whatever it likes
            self._fail("the supervisor", error)
            self._samples = samples({}, up=False, failures=self._failures)
            return
        answers = await asyncio.gather(*(self._report(model, deadline) for model in models))
        self._samples = samples(dict(filter(None, answers)), up=True, failures=self._failures)

    async def _report(
        self, model: str, deadline: float
    ) -> tuple[str, dict[str, Any] | None] | None:
        """The model with its report; None if it has gone meanwhile."""
        reading = self._trackers.shared_report(model, MAX_AGE)
        try:
            return model, await within(deadline - time.monotonic(), reading)
        except NotFoundError:
            return None
        except Exception as error:
            self._fail(f"the tracker of {model!r}", error)
            return model, None

    def _fail(self, who: str, error: Exception) -> None:
        self._failures += 1
        self._conditions.warn(who, "%s did not answer at a scrape: %r", who, error)


def _escaped(labels: Labels) -> Labels:
    """aioprometheus writes label values as they are."""
    return {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, value in labels.items()
    }


class _Live:
    """A collector that has no values of its own."""

    def __init__(self, family: Family, read: Callable[[str], list[Sample]], registry: Any) -> None:
        self._family = family
        self._read = read
        super().__init__(f"{PREFIX}{family.name}", family.help, registry=registry)  # type: ignore[call-arg]  # of the collector beside it

    def get_all(self) -> Any:
        return self._read(self._family.name)


class _Counter(_Live, Counter):
    pass


class _Gauge(_Live, Gauge):
    pass


class _Histogram(_Live, Histogram):
    pass


_KINDS = {"counter": _Counter, "gauge": _Gauge, "histogram": _Histogram}
