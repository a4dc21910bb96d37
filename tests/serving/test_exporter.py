"""Scrapes of xinference's own endpoint, even if trackers or the supervisor hang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import xoscar as xo
from aioprometheus.asgi.starlette import metrics
from aioprometheus.collectors import Counter, Registry
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.replicas import MODEL, TrackerProcess
from tests.logged import messages
from xinference_xavier.errors import NotFoundError
from xinference_xavier.protocol.tracker import Member, Settings, tracker_uid
from xinference_xavier.runtime.aio import within
from xinference_xavier.serving import metrics as exporter_module
from xinference_xavier.serving.gateway import TrackerGateway
from xinference_xavier.serving.metrics import FAMILIES, PREFIX, Exporter, add_metrics
from xinference_xavier.tracker.actor import BlockTracker

SHORT = 0.3
PLENTY = 2.5
ODD = 'say "hi"\\\nagain'
"""A name with characters that end a label's value or the line."""
XINFERENCE = """
import asyncio, json
import httpx
from xinference.api.restful_api import RESTfulAPI

class Server:
    def __init__(self, config):
        self.app = config.app

    def run(self):
        asyncio.run(self.scrape())

    async def scrape(self):
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            print(json.dumps((await client.get("/metrics")).text))

RESTfulAPI("127.0.0.1:1", "127.0.0.1", 0).serve(server_factory=Server)
"""
"""xinference's API with the extension of `XINFERENCE_EXTENSIONS`, without server and supervisor."""


class Supervisor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """Knows where each model's tracker is."""

    def __init__(self) -> None:
        super().__init__()
        self._addresses: dict[str, str] = {}

    async def put(self, model_uid: str, address: str) -> None:
        self._addresses[model_uid] = address

    async def xavier_models(self) -> list[str]:
        return list(self._addresses)

    async def xavier_tracker_address(self, model_uid: str) -> str:
        if self._addresses[model_uid] == "gone":
            raise NotFoundError(f"model {model_uid!r} does not share its cache here")
        return self._addresses[model_uid]


class BareSupervisor(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    """A supervisor without our extension."""


@pytest.fixture
async def address() -> AsyncIterator[str]:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    async with pool:
        yield pool.external_address


@pytest.fixture
async def supervisor(address: str) -> Any:
    return await xo.create_actor(Supervisor, address=address, uid="supervisor")


@pytest.fixture(scope="module")
def tracker_alone() -> Iterator[TrackerProcess]:
    tracker = TrackerProcess()
    yield tracker
    tracker.kill()


@pytest.fixture
def remote_tracker(tracker_alone: TrackerProcess) -> Iterator[TrackerProcess]:
    """The tracker of `MODEL`, in a process that a test may suspend."""
    yield tracker_alone
    send(tracker_alone, signal.SIGCONT)


def send(tracker: TrackerProcess, number: signal.Signals) -> None:
    assert tracker.process.pid is not None
    os.kill(tracker.process.pid, number)


async def add_model(supervisor: Any, address: str, model_uid: str) -> Any:
    tracker = await xo.create_actor(
        BlockTracker, model_uid, address=address, uid=tracker_uid(model_uid)
    )
    await supervisor.put(model_uid, address)
    return tracker


class Scraper:
    """`last` is the text of the last answer."""

    def __init__(self, supervisor: Any) -> None:
        async def get_supervisor_ref() -> Any:
            return supervisor

        app = FastAPI()
        app.state.registry = Registry()
        Counter("xinference:their_own_total", "Theirs.", registry=app.state.registry).inc({})
        add_metrics(SimpleNamespace(app=app), TrackerGateway(get_supervisor_ref))
        app.add_route("/metrics", metrics)
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://api", timeout=60
        )
        self.last = ""

    async def scrape(self, timeout: float | None = None) -> dict[str, list[Any]]:
        """Samples by name without the prefix. `timeout` is what Prometheus sends in its header."""
        headers = {} if timeout is None else {"X-Prometheus-Scrape-Timeout-Seconds": str(timeout)}
        answer = await self._client.get("/metrics", headers=headers)
        assert answer.status_code == 200
        self.last = answer.text
        found: dict[str, list[Any]] = {}
        for family in text_string_to_metric_families(self.last):
            for sample in family.samples:
                found.setdefault(sample.name.removeprefix(PREFIX), []).append(sample)
        assert found["xinference:their_own_total"][0].value == 1
        return found


@pytest.fixture
def scraper(supervisor: Any) -> Scraper:
    return Scraper(supervisor)


def value(found: dict[str, list[Any]], name: str, **labels: str) -> float:
    (sample,) = (sample for sample in found[name] if sample.labels.items() >= labels.items())
    number: float = sample.value
    return number


async def test_all_families_appear_beside_xinferences_own(scraper: Scraper) -> None:
    await scraper.scrape()
    for family in FAMILIES:
        assert f"# HELP {PREFIX}{family.name} {family.help}\n" in scraper.last
        assert f"# TYPE {PREFIX}{family.name} {family.kind}\n" in scraper.last


@pytest.mark.long
@pytest.mark.parametrize("disabled", ["0", "1"])
def test_xinferences_own_endpoint_shows_them_unless_it_is_disabled(
    disabled: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", XINFERENCE],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "XINFERENCE_EXTENSIONS": "xinference_xavier:extension",
            "XINFERENCE_AUTH_ADVANCED": "false",
            "XINFERENCE_DISABLE_METRICS": disabled,
            "XINFERENCE_HOME": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    assert ("# TYPE xinference:model_info gauge\n" in shown) == (disabled == "0")
    assert (f"\n{PREFIX}up 0\n" in shown) == (disabled == "0"), "there is no supervisor"


async def test_each_scrape_shows_the_current_state(
    scraper: Scraper, supervisor: Any, address: str
) -> None:
    assert "enabled" not in await scraper.scrape()
    tracker = await add_model(supervisor, address, "m")
    assert value(await scraper.scrape(), "enabled", model="m") == 1
    await tracker.set_enabled(False)
    await asyncio.sleep(exporter_module.MAX_AGE)  # scrapes at the same time share an answer
    assert value(await scraper.scrape(), "enabled", model="m") == 0


async def test_names_are_escaped(scraper: Scraper, supervisor: Any, address: str) -> None:
    tracker = await add_model(supervisor, address, ODD)
    await tracker.join("ns", Member("a", "127.0.0.1:1"), 36, Settings(), ODD)
    found = await scraper.scrape()
    assert value(found, "tracker_up", model=ODD) == 1
    assert value(found, "replica_up", model=ODD, replica=ODD) == 0


async def test_a_tracker_that_hangs_costs_its_own_figures_only(
    scraper: Scraper, supervisor: Any, address: str, remote_tracker: TrackerProcess
) -> None:
    await add_model(supervisor, address, "well")
    await supervisor.put(MODEL, remote_tracker.address)
    assert value(await scraper.scrape(), "tracker_up", model=MODEL) == 1
    send(remote_tracker, signal.SIGSTOP)
    await asyncio.sleep(exporter_module.MAX_AGE)
    for missed in (1, 2, 3):
        began = time.monotonic()
        found = await scraper.scrape(2 * SHORT)
        assert time.monotonic() - began >= SHORT, "the tracker was asked"
        assert value(found, "up") == value(found, "tracker_up", model="well") == 1
        assert value(found, "enabled", model="well") == 1
        assert value(found, "tracker_up", model=MODEL) == 0
        assert value(found, "scrape_failures_total") == missed
        assert [sample.labels["model"] for sample in found["enabled"]] == ["well"]
    send(remote_tracker, signal.SIGCONT)
    async with asyncio.timeout(60):
        while value(await scraper.scrape(), "tracker_up", model=MODEL) != 1:
            pass


async def test_a_supervisor_that_hangs_is_not_up(
    address: str, remote_tracker: TrackerProcess
) -> None:
    send(remote_tracker, signal.SIGSTOP)

    async def hanging() -> Any:
        return await xo.actor_ref(address=remote_tracker.address, uid="supervisor")

    exporter = Exporter(TrackerGateway(hanging))
    registry = Registry()
    exporter.register(registry)
    await exporter.refresh(SHORT)
    assert exporter.read("up") == [({}, 0)]
    assert exporter.read("scrape_failures_total") == [({}, 1)]


async def test_all_answers_share_the_time_of_the_scrape(
    scraper: Scraper, supervisor: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []

    async def noted(seconds: float, call: Any) -> Any:
        waits.append(seconds)
        return await within(seconds, call)

    monkeypatch.setattr(exporter_module, "within", noted)
    await add_model(supervisor, address, "m")
    await add_model(supervisor, address, "n")
    assert value(await scraper.scrape(2 * PLENTY), "tracker_up", model="n") == 1
    whole, *parts = waits
    assert whole == min(PLENTY, exporter_module.MAX_SECONDS)
    assert len(parts) == 2
    assert all(0 < part < whole for part in parts)


async def test_a_supervisor_without_our_part_is_not_up(address: str) -> None:
    bare = await xo.create_actor(BareSupervisor, address=address, uid="bare")
    scraper = Scraper(bare)
    assert value(await scraper.scrape(), "up") == 0


async def test_a_missing_answer_is_logged_once_and_counted(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    scraper = Scraper(await xo.create_actor(BareSupervisor, address=address, uid="bare"))
    for missed in range(1, 5):
        assert value(await scraper.scrape(), "scrape_failures_total") == missed
    assert len(messages(caplog)) == 1


async def test_a_model_that_ends_during_a_scrape_is_no_failure(
    scraper: Scraper, supervisor: Any
) -> None:
    await supervisor.put("m", "gone")
    found = await scraper.scrape()
    assert value(found, "up") == 1
    assert value(found, "scrape_failures_total") == 0
    assert "tracker_up" not in found


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("", 3.0), ("nonsense", 3.0), ("10", 3.0), ("2", 1.0), ("-1", 0.0), ("nan", 3.0)],
)
def test_a_scrape_leaves_prometheus_half_of_its_time(said: str, seconds: float) -> None:
    assert exporter_module._deadline(said) == seconds


async def test_an_api_that_restarts_in_its_process_replaces_the_collectors(
    supervisor: Any,
) -> None:
    async def get_supervisor_ref() -> Any:
        return supervisor

    registry = Registry()
    first, second = (Exporter(TrackerGateway(get_supervisor_ref)) for _ in range(2))
    first.register(registry)
    second.register(registry)
    assert len(registry.get_all()) == len(FAMILIES)
    await second.refresh(10.0)
    assert registry.get(f"{PREFIX}up").get_all() == [({}, 1)]
