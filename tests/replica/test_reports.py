"""What operators learn of a replica: log lines, events and counts. What routers learn: its load is
reported from time to time, and at once where a router would be wrong."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from tests.logged import messages, records
from tests.tracker_pools import let_others_run
from xinference_xavier.errors import NotSharing
from xinference_xavier.peers import Peer
from xinference_xavier.pool.pool import Pool, PoolCounts
from xinference_xavier.protocol.load import Load, RequestReport, Serving
from xinference_xavier.protocol.tracker import SHORT_KEY, NotMemberError, Outcome, pack_short
from xinference_xavier.replica import reports as module
from xinference_xavier.replica.fetcher import FetchCounts
from xinference_xavier.replica.replica import Replica
from xinference_xavier.replica.reports import (
    ClientCounts,
    EventReporter,
    Identity,
    LoadReporter,
    Publisher,
    SharingLog,
)
from xinference_xavier.stats.schema import (
    ComparisonStats,
    DiskStats,
    FetchStats,
    Hits,
    PoolStats,
    ReplicaFetches,
    ReplicaStats,
)


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.levelname} {record.getMessage()}" for record in records(caplog)]


def test_sharing_that_begins_or_stops_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """However often it is looked at, and whatever else keeps it from working meanwhile. What never
    worked does not stop."""
    log = SharingLog("a")
    for reason, peers in (
        *((reason, 0) for reason in NotSharing),
        (None, 1),
        (None, 2),
        (NotSharing.NO_PEERS, 0),
        *((reason, 0) for reason in NotSharing),
        (None, 3),
    ):
        for _ in range(3):
            log.update(reason, peers)
    assert lines(caplog) == [
        "INFO sharing works: incarnation=a peers=1",
        "WARNING sharing stopped, no other replica in this namespace: incarnation=a",
        "INFO sharing works: incarnation=a peers=3",
    ]


@pytest.mark.parametrize("reason", NotSharing)
def test_every_reason_is_explained(reason: NotSharing, caplog: pytest.LogCaptureFixture) -> None:
    log = SharingLog("a")
    log.update(None, 1)
    log.update(reason, 0)
    assert len(lines(caplog)[1]) > len("WARNING sharing stopped, : incarnation=a")


def test_an_outage_of_the_tracker_has_one_beginning_and_one_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many sessions fail in it. The first session is no event."""
    reporter = EventReporter(Identity("m", "a", ""))
    reporter.tracker_session(None)
    for _ in range(2):
        for error in (ConnectionError("refused"), TimeoutError(), None, None):
            reporter.tracker_session(error)
    pending = [event["event"] for event in reporter.pending]
    assert pending == ["TrackerLost", "TrackerRegained"] * 2
    assert reporter.pending[0]["reason"] == "ConnectionError('refused')"
    both = [
        "tracker lost, retrying: model=m incarnation=a error=ConnectionError('refused')",
        "tracker joined again: model=m incarnation=a",
    ]
    assert messages(caplog) == both * 2


async def test_a_snapshot_has_the_latest_chunks_that_the_tracker_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [b"%036d" % number for number in range(5)]
    monkeypatch.setattr(module, "MAX_PACKED_BYTES", 3 * SHORT_KEY - 1)
    sent: list[object] = []

    async def call(method: str, sequence: int, *publication: object) -> Outcome:
        sent.append((method, *publication))
        return Outcome.APPLIED

    pool = Pool(len(keys))
    for row in pool.reserve(keys).rows:
        pool.commit(row, checksum=1)
    await Publisher("a", pool).send_holdings(call)
    assert sent == [("publish", pack_short(keys[3:]), b"", True)]


HITS = Hits(remote=3)
DISK = DiskStats("/disk", "open", "", 26, 27, 28, 29)


PEERS = {
    "a": Peer("a", 2, received=2),
    "b": Peer("b", 4, received=8),
    "c": Peer("c", 8),
}


def stats(counts: FetchCounts) -> dict[str, Any]:
    replica: Any = SimpleNamespace(
        engine=SimpleNamespace(stats=lambda: {"hits": HITS, "requests": 2}),
        config=SimpleNamespace(from_environment=("queue",), engines=25, replaced_vllm="==0.21.0"),
        _fetched=counts,
        _row_bytes=64,
        _cache_rows=24,
        tier=SimpleNamespace(
            pool=SimpleNamespace(counts=lambda: PoolCounts(16, 5, 4, 3, 2)),
            disk=SimpleNamespace(report=lambda: DISK),
        ),
        neighbours=SimpleNamespace(mapped_bytes=26),
        donor=SimpleNamespace(grants=[1, 2]),
        index=range(8),
        peers=PEERS,
        canary=SimpleNamespace(stats=ComparisonStats(16, 17, 18, 19)),
        process=SimpleNamespace(pid=11, starts=3),
        _client=SimpleNamespace(
            counts=ClientCounts(failures=1, stats_failures=2, claim_failures=3)
        ),
        _not_sharing=lambda: "no peers",
        _background=SimpleNamespace(refused=15),
    )
    return Replica.stats(replica)


def test_every_count_is_reported() -> None:
    counts = FetchCounts(
        fetches=ReplicaFetches(4, 3, {"timeout": 1}, {"gloo": FetchStats()}),
        rows=10,
        in_flight=Counter(a=6),
    )
    expected = ReplicaStats(
        from_environment=["queue"],
        replaced_vllm="==0.21.0",
        hits=HITS,
        requests=2,
        bytes_received=640,
        received_from={"b": 512, "a": 128},
        fetching={"a": 6},
        fetches=ReplicaFetches(4, 3, {"timeout": 1}, {"gloo": FetchStats()}),
        pool=PoolStats(16, 5, 4, 3, 2, 64, 24, 25),
        mapped_bytes=26,
        grants=2,
        indexed=8,
        comparison=ComparisonStats(16, 17, 18, 19),
        disk=DISK,
        not_sharing="no peers",
        refused_posts=15,
        transfer_pid=11,
        transfer_restarts=2,
        tracker_failures=6,
    )
    assert stats(counts) == asdict(expected)


# -- the load --------------------------------------------------------------------------------------

INTERVAL = 3600.0
RATES = (1e-3, 0.0, 0.0, 0.0)
UNMEASURED = Load(Serving(128, 1 << 20), prefill_tokens=0, prefill_s=None, requests=0)
PROMPT, OTHER = (RequestReport(name, 100, b"k" * 12) for name in "rs")
ANSWER = RequestReport("r", 0, b"", answer=50)

Report = tuple[Load, tuple[RequestReport, ...]]


def load(seconds: float, **fields: Any) -> Load:
    return UNMEASURED._replace(prefill_s=seconds, rates=RATES, **fields)


class Scene:
    """An engine, the reporter that looks at it, and the tracker that it reports to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engine_load: Load | None = load(0.0)
        self.engine_error: Exception | None = None
        self.prompts: deque[RequestReport] = deque()
        self.answers: deque[RequestReport] = deque()
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

    async def _call(self, method: str, *report: Any) -> bool:
        assert method == "report_load"
        if self.tracker_error is not None:
            raise self.tracker_error
        load, requests = report
        self._reports.append((load, requests))
        return self.router_listens

    async def reports(self) -> list[Report]:
        """The reports since the last call, once the reporter has had time to look. The first call
        starts it."""
        if self.running is None:
            reporter = LoadReporter(
                self.load, self.prompts, self.answers, self.ready, lambda: self.now
            )
            self.running = asyncio.create_task(reporter.run(self._call))
        await let_others_run()
        reports, self._reports = self._reports, []
        return reports


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """While a router listens, the reporter looks whenever the loop is free; otherwise, once."""
    monkeypatch.setattr(module, "_LOOK", 0.0)
    monkeypatch.setattr(module, "INTERVAL", INTERVAL)
    scene = Scene()
    yield scene
    scene.running.cancel()
    await asyncio.wait({scene.running})


async def test_the_load_is_reported_at_once_and_with_each_interval(scene: Scene) -> None:
    """Even if nothing has changed: routers take a replica that does not report for lost."""
    assert await scene.reports() == [(load(0.0), ())]
    scene.now += INTERVAL - 0.1
    assert await scene.reports() == []
    for _ in range(2):
        scene.now += INTERVAL
        assert await scene.reports() == [(load(0.0), ())]


async def test_without_a_router_that_is_all(scene: Scene) -> None:
    scene.router_listens = False
    await scene.reports()
    scene.engine_load = load(60.0)
    scene.prompts.append(PROMPT)
    assert await scene.reports() == []


async def test_without_a_router_it_is_reported_again_and_again(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    scene.router_listens = False
    reports = await scene.reports()
    assert len(reports) > 1
    assert set(reports) == {(load(0.0), ())}


async def test_nothing_is_reported_while_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, scene: Scene
) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.0)
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
        [(0.0, UNMEASURED, True), (0.0, UNMEASURED._replace(step=(0.1, 0.0)), False)],
    ],
    ids=[
        "work that no router expects",
        "not work that takes its time",
        "work that takes longer by a third, but not by a fifth",
        "work that is done earlier",
        "not a little work",
        "anything of an engine that has measured nothing",
        "not how long steps take, which changes in each",
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
        scene.prompts += [*prompts]
        assert await scene.reports() == [(load(0.0), tuple(prompts))]
        assert await scene.reports() == []


async def test_answers_are_reported_once_along_with_something_else(scene: Scene) -> None:
    await scene.reports()
    scene.answers += [ANSWER]
    assert await scene.reports() == []
    scene.prompts += [OTHER]
    assert await scene.reports() == [(load(0.0), (OTHER, ANSWER))]
    scene.answers += [ANSWER]
    scene.now += INTERVAL
    assert await scene.reports() == [(load(0.0), (ANSWER,))]
    scene.now += INTERVAL
    assert await scene.reports() == [(load(0.0), ())]


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
