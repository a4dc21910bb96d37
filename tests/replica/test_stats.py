"""A replica reports the counts of its parts."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from xinference_xavier.pool.pool import PoolCounts
from xinference_xavier.replica.fetcher import FetchCounts
from xinference_xavier.replica.replica import replica_stats
from xinference_xavier.stats.schema import (
    ComparisonStats,
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
        pool=SimpleNamespace(counts=lambda: PoolCounts(16, 5, 4, 3, 2)),  # type: ignore[arg-type]
        donor=SimpleNamespace(grants=[1, 2], refused=7),  # type: ignore[arg-type]
        mirror=Mirror(),  # type: ignore[arg-type]
        canary=SimpleNamespace(stats=ComparisonStats(16, 17, 18, 19)),  # type: ignore[arg-type]
        warm_join=WarmJoinStats(20, 1.5, 21),
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
        pool=PoolStats(16, 5, 4, 3, 2, 64),
        grants=GrantStats(2, 7),
        mirror=MirrorStats(8, 9),
        comparison=ComparisonStats(16, 17, 18, 19),
        warm_join=WarmJoinStats(20, 1.5, 21),
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
