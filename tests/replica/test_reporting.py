"""What operators learn of a replica: log lines, events and counts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.logged import messages, records
from xinference_xavier.config import XavierConfig
from xinference_xavier.errors import NotSharing
from xinference_xavier.pool.pool import PoolCounts
from xinference_xavier.replica.canary import Difference, ProbeResult
from xinference_xavier.replica.event_reporter import EventReporter
from xinference_xavier.replica.fetcher import FetchCounts
from xinference_xavier.replica.replica import SharingLog, replica_stats, take_result
from xinference_xavier.stats.schema import (
    ComparisonStats,
    DiskStats,
    FetchStats,
    GrantStats,
    Hits,
    HookStats,
    MirrorStats,
    PoolStats,
    ReplicaFetches,
    ReplicaStats,
    WarmJoinStats,
)


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.levelname} {record.getMessage()}" for record in records(caplog)]


def test_sharing_that_never_worked_does_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    log = SharingLog("a")
    for reason in NotSharing:
        log.update(reason, 0)
    assert lines(caplog) == []


def test_sharing_that_begins_or_stops_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """However often it is looked at, and whatever else keeps it from working meanwhile."""
    log = SharingLog("a")
    for reason, peers in (
        (NotSharing.NOT_JOINED, 0),
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
    reporter = EventReporter(XavierConfig("m", "10.0.0.1:9999"), "a")
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


SKETCH = {"layer": ("float32", [1.0])}
FOUND = Difference("layer", 0.5)


class Recorder:
    """Canary, events and pool that only record their calls."""

    def __init__(self) -> None:
        self.stats = ComparisonStats()
        self.told: list[tuple[Any, ...]] = []

    def probed(self, *arguments: Any) -> None:
        self.told.append(("probed", *arguments))

    def distrust(self, *arguments: Any) -> None:
        self.told.append(("distrust", *arguments))

    def audit_failed(self, *arguments: Any) -> None:
        self.told.append(("audit failed", *arguments))

    def flush(self, donor: str | None) -> int:
        self.told.append(("flush", donor))
        return 0


@pytest.mark.parametrize(
    ("result", "told", "counts"),
    [
        (ProbeResult(b"key", SKETCH), [("probed", b"key", SKETCH)], ComparisonStats()),
        (ProbeResult(None, SKETCH, "peer"), [], ComparisonStats(audits=1)),
        (ProbeResult(None, {}, lost=True), [], ComparisonStats(lost_probes=1)),
        (
            ProbeResult(None, SKETCH, "peer", FOUND),
            [("audit failed", "peer", FOUND), ("distrust", "peer", FOUND), ("flush", "peer")],
            ComparisonStats(audits=1, failed_audits=1),
        ),
        (
            ProbeResult(None, SKETCH, None, FOUND),
            [("audit failed", None, FOUND), ("flush", None)],
            ComparisonStats(audits=1, failed_audits=1),
        ),
    ],
    ids=[
        "a canary is compared with peers",
        "an audit without a difference is counted",
        "a probe that the engine did not compute is counted",
        "after a difference all rows from that donor are dropped",
        "and from any donor if it is not known",
    ],
)
def test_what_follows_from_a_probe(
    result: ProbeResult, told: list[Any], counts: ComparisonStats
) -> None:
    recorder: Any = Recorder()
    take_result(result, recorder, None, recorder, recorder.flush)
    assert recorder.told == told
    assert recorder.stats == counts


HITS = Hits(remote=3)


class Mirror:
    dropped = 9

    def __len__(self) -> int:
        return 8


def stats(counts: FetchCounts) -> ReplicaStats:
    return replica_stats(
        {"hits": HITS, "requests": 2},
        ("queue",),
        counts,
        row_bytes=64,
        cache_rows=24,
        engines=25,
        pool=SimpleNamespace(counts=lambda: PoolCounts(16, 5, 4, 3, 2)),  # type: ignore[arg-type]
        donor=SimpleNamespace(grants=[1, 2], refused=7),  # type: ignore[arg-type]
        mirror=Mirror(),  # type: ignore[arg-type]
        canary=SimpleNamespace(stats=ComparisonStats(16, 17, 18, 19)),  # type: ignore[arg-type]
        warm_join=WarmJoinStats(20, 1.5, 21),
        disk=SimpleNamespace(report=lambda: DiskStats("/disk", "open", "", 26, 27, 28, 29)),  # type: ignore[arg-type]
        process=SimpleNamespace(pid=11, starts=3, failed_calls=12),  # type: ignore[arg-type]
        hooks=SimpleNamespace(failed=13, dropped=14),  # type: ignore[arg-type]
        not_sharing="no peers",
        refused_posts=15,
    )


def test_every_count_is_reported() -> None:
    counts = FetchCounts(
        fetches=ReplicaFetches(4, 3, {"timeout": 1}, {"gloo": FetchStats()}, 5),
        rows=10,
        in_flight=Counter(a=6),
        received=Counter(a=2, b=8),
    )
    assert stats(counts) == ReplicaStats(
        from_environment=["queue"],
        hits=HITS,
        requests=2,
        bytes_received=640,
        received_from={"b": 512, "a": 128},
        fetching={"a": 6},
        fetches=ReplicaFetches(4, 3, {"timeout": 1}, {"gloo": FetchStats()}, 5),
        pool=PoolStats(16, 5, 4, 3, 2, 64, 24, 25),
        grants=GrantStats(2, 7),
        mirror=MirrorStats(8, 9),
        comparison=ComparisonStats(16, 17, 18, 19),
        warm_join=WarmJoinStats(20, 1.5, 21),
        disk=DiskStats("/disk", "open", "", 26, 27, 28, 29),
        hooks=HookStats(13, 14),
        not_sharing="no peers",
        refused_posts=15,
        transfer_pid=11,
        transfer_restarts=2,
        transfer_failed_calls=12,
    )


def test_the_donors_of_the_most_bytes_have_names() -> None:
    counts = FetchCounts(received=Counter({str(number): number for number in range(200)}))
    reported = stats(counts)
    assert len(reported.received_from) == 100
    assert reported.received_from["199"] == 199 * 64
