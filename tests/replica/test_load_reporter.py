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
        """The reports since the last call, once the reporter has had time to look. The first call
        starts it."""
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


@pytest.mark.parametrize(
    "looks",
    [
        [(0.0, load(0.0), True), (0.0, load(2.0), True), (0.0, load(0.0), True)],
        [
            (0.0, load(2.0), True),
            *((0.5, load(left), False) for left in (1.5, 1.0, 0.5, 0.0, 0.0)),
        ],
        [(0.0, load(2.0), True), (1.0, load(1.2), False), (0.0, load(1.3), True)],
        [(0.0, load(2.0), True), (0.0, load(1.4), True)],
        [(0.0, load(0.0), True), (0.0, load(0.04), False), (0.0, load(0.06), True)],
        [
            (0.0, UNMEASURED, True),
            (0.0, UNMEASURED._replace(requests=1), True),
            (0.0, load(0.0), True),
            (0.0, load(0.0, requests=2), False),
        ],
    ],
    ids=[
        "work that no router expects",
        "not work that takes its time",
        "work that takes longer by a third, but not by a fifth",
        "work that is done earlier",
        "not a little work",
        "anything of an engine that has measured nothing",
    ],
)
async def test_what_routers_do_not_expect_is_reported_at_once(
    scene: Scene, looks: list[tuple[float, Load, bool]]
) -> None:
    """Each look at the engine: the seconds since the last one, the load, and if it is reported.
    Where no replica has measured anything, the one with the fewest requests is chosen."""
    for seconds, seen, is_reported in looks:
        scene.now += seconds
        scene.engine_load = seen
        assert await scene.reports() == ([(seen, ())] if is_reported else [])


async def test_prompts_are_reported_at_once_each_once(scene: Scene) -> None:
    """Only from them do routers learn what the keys of a text are."""
    await scene.reports()
    for prompts in ([PROMPT], [OTHER, PROMPT]):
        scene.prompts = [*prompts]
        assert await scene.reports() == [(load(0.0), tuple(prompts))]
        assert await scene.reports() == []


async def test_a_failed_call_ends_the_session(scene: Scene) -> None:
    """The replica joins again then."""
    await scene.reports()
    scene.tracker_error = NotMemberError("join first")
    scene.now += INTERVAL
    with pytest.raises(NotMemberError, match="join first"):
        await scene.running


async def test_a_load_that_cannot_be_counted_is_logged_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """The replica goes on sharing."""
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
