"""A replica's load is reported from time to time, and at once where a router would be wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.tracker_pools import let_others_run
from xinference_xavier.protocol.load import Load, ScheduledPrompt, Serving
from xinference_xavier.protocol.tracker import NotMemberError
from xinference_xavier.replica import reports as reporter_module
from xinference_xavier.replica.reports import LoadReporter

INTERVAL = 3600.0
RATES = (1e-3, 0.0, 0.0, 0.0)
UNMEASURED = Load(Serving(128, 1 << 20), prefill_tokens=0, prefill_s=None, requests=0)
PROMPT, OTHER = (ScheduledPrompt(name, 100, b"k" * 12) for name in "rs")

Report = tuple[Load, tuple[ScheduledPrompt, ...]]


def load(seconds: float, **fields: Any) -> Load:
    return UNMEASURED._replace(prefill_s=seconds, rates=RATES, **fields)


class Scene:
    """An engine, the reporter that looks at it, and the tracker that it reports to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engine_load: Load | None = load(0.0)
        self.engine_error: Exception | None = None
        self.prompts: list[ScheduledPrompt] = []
        self.router_listens = True
        self.ready = asyncio.Event()
        self.ready.set()
        self.tracker_error: Exception | None = None
        self._reports: list[Report] = []
        self.running: asyncio.Task[None] | None = None

    def load(self) -> Load | None:
        if self.engine_error is not None:
            raise self.engine_error
        return self.engine_load

    def take_prompts(self) -> tuple[ScheduledPrompt, ...]:
        prompts, self.prompts = self.prompts, []
        return tuple(prompts)

    async def _call(self, method: str, *report: Any) -> bool:
        assert method == "report_load"
        if self.tracker_error is not None:
            raise self.tracker_error
        load, prompts = report
        self._reports.append((load, prompts))
        return self.router_listens

    async def reports(self) -> list[Report]:
        """Those since the last call, once the reporter has had time to look. The first call starts
        it."""
        if self.running is None:
            reporter = LoadReporter(self, lambda: self.now, self.ready.wait)
            self.running = asyncio.create_task(reporter.run(self._call))
        await let_others_run()
        reports, self._reports = self._reports, []
        return reports


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """While a router listens, the reporter looks whenever the loop is free; otherwise, once."""
    monkeypatch.setattr(reporter_module, "_LOOK", 0.0)
    monkeypatch.setattr(reporter_module, "INTERVAL", INTERVAL)
    scene = Scene()
    yield scene
    assert scene.running is not None
    scene.running.cancel()
    await asyncio.wait({scene.running})


async def test_the_load_is_reported_as_soon_as_there_is_a_tracker(scene: Scene) -> None:
    assert await scene.reports() == [(load(0.0), ())]


async def test_and_with_each_interval_even_if_nothing_has_changed(scene: Scene) -> None:
    """Routers take a replica that does not report for lost."""
    await scene.reports()
    scene.now += INTERVAL - 0.1
    assert await scene.reports() == []
    for _ in range(2):
        scene.now += INTERVAL
        assert await scene.reports() == [(load(0.0), ())]


async def test_without_a_router_that_is_all(scene: Scene) -> None:
    scene.router_listens = False
    await scene.reports()
    scene.engine_load, scene.prompts = load(60.0), [PROMPT]
    assert await scene.reports() == []


async def test_without_a_router_it_is_reported_again_and_again(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    monkeypatch.setattr(reporter_module, "INTERVAL", 0.0)
    scene.router_listens = False
    reports = await scene.reports()
    assert len(reports) > 1
    assert set(reports) == {(load(0.0), ())}


async def test_nothing_is_reported_while_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    monkeypatch.setattr(reporter_module, "INTERVAL", 0.0)
    scene.engine_load = None
    assert await scene.reports() == []
    scene.engine_load = load(0.0)
    assert await scene.reports() != []


class TestAtOnce:
    async def test_a_load_is_reported_that_no_router_expects(self, scene: Scene) -> None:
        await scene.reports()
        for seconds in (2.0, 0.0):
            scene.engine_load = load(seconds)
            assert await scene.reports() == [(load(seconds), ())]

    async def test_nothing_is_reported_while_work_takes_its_time(self, scene: Scene) -> None:
        scene.engine_load = load(2.0)
        await scene.reports()
        for left in (1.5, 1.0, 0.5, 0.0, 0.0):
            scene.now += 0.5
            scene.engine_load = load(left)
            assert await scene.reports() == []

    async def test_work_that_takes_longer_is_reported(self, scene: Scene) -> None:
        scene.engine_load = load(2.0)
        await scene.reports()
        scene.now += 1.0
        scene.engine_load = load(1.2)
        assert await scene.reports() == [], "by a fifth"
        scene.engine_load = load(1.3)
        assert await scene.reports() == [(load(1.3), ())], "by a third"

    async def test_work_that_is_done_earlier_is_reported(self, scene: Scene) -> None:
        scene.engine_load = load(2.0)
        await scene.reports()
        scene.engine_load = load(1.4)
        assert await scene.reports() == [(load(1.4), ())]

    async def test_a_little_work_is_no_news(self, scene: Scene) -> None:
        await scene.reports()
        scene.engine_load = load(0.04)
        assert await scene.reports() == []
        scene.engine_load = load(0.06)
        assert await scene.reports() == [(load(0.06), ())]

    async def test_anything_is_news_of_an_engine_that_has_measured_nothing(
        self, scene: Scene
    ) -> None:
        """Where no replica has, the one with the fewest requests is chosen."""
        scene.engine_load = UNMEASURED
        await scene.reports()
        for news in (UNMEASURED._replace(requests=1), load(0.0)):
            scene.engine_load = news
            assert await scene.reports() == [(news, ())]
        scene.engine_load = load(0.0, requests=2)
        assert await scene.reports() == []

    async def test_prompts_are_reported_each_once(self, scene: Scene) -> None:
        """Only from them do routers learn what the keys of a text are."""
        await scene.reports()
        for prompts in ([PROMPT], [OTHER, PROMPT]):
            scene.prompts = [*prompts]
            assert await scene.reports() == [(load(0.0), tuple(prompts))]
            assert await scene.reports() == []


class TestFailure:
    async def test_of_a_call_ends_the_session(self, scene: Scene) -> None:
        """The replica joins again then."""
        await scene.reports()
        scene.tracker_error = NotMemberError("join first")
        scene.now += INTERVAL
        assert scene.running is not None
        with pytest.raises(NotMemberError, match="join first"):
            await scene.running

    async def test_to_count_the_load_does_not_end_the_session(
        self, scene: Scene, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is logged once, and the replica goes on sharing."""
        await scene.reports()
        scene.engine_error = RuntimeError("no such attribute")
        scene.now += INTERVAL
        assert await scene.reports() == []
        assert caplog.text.count("no such attribute") == 1
        scene.engine_error = None
        assert await scene.reports() == [(load(0.0), ())]


async def test_nothing_is_reported_before_the_replica_takes_requests(scene: Scene) -> None:
    scene.ready.clear()
    assert await scene.reports() == []
    scene.ready.set()
    assert await scene.reports() == [(load(0.0), ())]
