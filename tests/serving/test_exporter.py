"""Scrapes of xinference's own endpoint, even if trackers or the supervisor hang."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
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

from tests.harness.replicas import TrackerProcess
from tests.logged import messages
from tests.serving.supervisors import Bare, Supervisor, gateway_to, join
from tests.tracker_pools import MODEL, create_tracker
from xinference_xavier.runtime.aio import within
from xinference_xavier.serving import metrics as exporter_module
from xinference_xavier.serving.gateway import TrackerGateway
from xinference_xavier.serving.metrics import FAMILIES, PREFIX, Exporter, add_metrics

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


async def add_model(supervisor: Any, address: str, model_uid: str) -> Any:
    await supervisor.put(model_uid)
    return await create_tracker(address, model_uid)


class Scraper:
    """`last` is the text of the last answer."""

    def __init__(self, supervisor: Any) -> None:
        app = FastAPI()
        app.state.registry = Registry()
        Counter("xinference:their_own_total", "Theirs.", registry=app.state.registry).inc({})
        add_metrics(SimpleNamespace(app=app), gateway_to(supervisor))
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
async def supervisor(address: str) -> Any:
    """Knows no model yet."""
    return await xo.create_actor(Supervisor, address=address)


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
        assert f"# HELP {PREFIX}{family.name} {family.figure.text}\n" in scraper.last
        assert f"# TYPE {PREFIX}{family.name} {family.figure.kind}\n" in scraper.last


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
    assert value(await scraper.scrape(), "enabled", model_uid="m") == 1
    await tracker.set_enabled(False)
    await asyncio.sleep(exporter_module.MAX_AGE)  # scrapes at the same time share an answer
    assert value(await scraper.scrape(), "enabled", model_uid="m") == 0


async def test_names_are_escaped(scraper: Scraper, supervisor: Any, address: str) -> None:
    tracker = await add_model(supervisor, address, ODD)
    await join(tracker, "a", ODD)
    found = await scraper.scrape()
    assert value(found, "tracker_up", model_uid=ODD) == 1
    assert value(found, "replica_up", model_uid=ODD, replica_index=ODD) == 0


async def test_a_tracker_that_hangs_costs_its_own_figures_only(
    scraper: Scraper,
    supervisor: Any,
    address: str,
    stoppable_tracker: TrackerProcess,
) -> None:
    await add_model(supervisor, address, "well")
    await supervisor.put(MODEL, stoppable_tracker.address)
    assert value(await scraper.scrape(), "tracker_up", model_uid=MODEL) == 1
    stoppable_tracker.send_signal(signal.SIGSTOP)
    await asyncio.sleep(exporter_module.MAX_AGE)
    for _ in range(3):
        began = time.monotonic()
        found = await scraper.scrape(2 * SHORT)
        assert time.monotonic() - began >= SHORT, "the tracker was asked"
        assert value(found, "up") == value(found, "tracker_up", model_uid="well") == 1
        assert value(found, "enabled", model_uid="well") == 1
        assert value(found, "tracker_up", model_uid=MODEL) == 0
        assert [sample.labels["model_uid"] for sample in found["enabled"]] == ["well"]
    stoppable_tracker.send_signal(signal.SIGCONT)
    async with asyncio.timeout(60):
        while value(await scraper.scrape(), "tracker_up", model_uid=MODEL) != 1:
            pass


async def test_a_supervisor_that_hangs_is_not_up(
    stoppable_tracker: TrackerProcess,
) -> None:
    stoppable_tracker.send_signal(signal.SIGSTOP)

    async def hanging() -> Any:
        return await xo.actor_ref(address=stoppable_tracker.address, uid="supervisor")

    exporter = Exporter(TrackerGateway(hanging))
    registry = Registry()
    exporter.register(registry)
    await exporter.refresh(SHORT)
    assert exporter.read("up") == [({}, 0)]


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
    assert value(await scraper.scrape(2 * PLENTY), "tracker_up", model_uid="n") == 1
    whole, *parts, making = waits
    assert whole == min(PLENTY, exporter_module.MAX_SECONDS)
    assert making == exporter_module.MAX_SECONDS, "what is made of them"
    assert len(parts) == 2
    assert all(0 < part < whole for part in parts)


async def test_a_supervisor_without_our_part_is_not_up_which_is_logged_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    scraper = Scraper(await xo.create_actor(Bare, address=address))
    for _ in range(4):
        assert value(await scraper.scrape(), "up") == 0
    assert len(messages(caplog)) == 1


async def test_a_model_that_ends_during_a_scrape_is_no_failure(
    scraper: Scraper, supervisor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await supervisor.put("m", None)
    found = await scraper.scrape()
    assert value(found, "up") == 1
    assert "tracker_up" not in found
    assert messages(caplog) == []


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("", 3.0), ("nonsense", 3.0), ("10", 3.0), ("2", 1.0), ("-1", 0.0), ("nan", 3.0)],
)
def test_a_scrape_leaves_prometheus_half_of_its_time(said: str, seconds: float) -> None:
    assert exporter_module._deadline(said) == seconds


async def test_an_api_that_restarts_in_its_process_replaces_the_collectors(
    supervisor: Any,
) -> None:
    registry = Registry()
    first, second = (Exporter(gateway_to(supervisor)) for _ in range(2))
    first.register(registry)
    second.register(registry)
    assert len(registry.get_all()) == len(FAMILIES)
    await second.refresh(10.0)
    assert registry.get(f"{PREFIX}up").get_all() == [({}, 1)]
