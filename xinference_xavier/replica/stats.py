"""A replica's stats, as its heartbeats carry them to the tracker."""

from __future__ import annotations

from typing import Any

from xinference_xavier.hooks import Hooks
from xinference_xavier.mirror.mirror import Mirror
from xinference_xavier.pool.pool import Pool
from xinference_xavier.replica.canary import Canary
from xinference_xavier.replica.donor import Donor
from xinference_xavier.replica.fetcher import FetchCounts
from xinference_xavier.replica.transfer_process import TransferProcess
from xinference_xavier.stats import schema
from xinference_xavier.stats.warm_join import WarmJoinStats

_MAX_DONORS = 100  # reported by name


def replica_stats(
    engine: dict[str, Any],
    from_environment: tuple[str, ...],
    counts: FetchCounts,
    *,
    row_bytes: int,
    pool: Pool,
    donor: Donor,
    mirror: Mirror,
    canary: Canary,
    warm_join: WarmJoinStats,
    process: TransferProcess,
    hooks: Hooks,
    not_sharing: str | None,
    refused_posts: int,
) -> schema.ReplicaStats:
    """`engine` are the fields that the engine counts."""
    return schema.ReplicaStats(
        **engine,
        from_environment=[*from_environment],
        bytes_received=counts.rows * row_bytes,
        received_from={
            name: rows * row_bytes for name, rows in counts.received.most_common(_MAX_DONORS)
        },
        fetching=dict(counts.in_flight.most_common(_MAX_DONORS)),
        fetches=counts.fetches,
        pool=schema.PoolStats(**pool.counts()._asdict(), row_bytes=row_bytes),
        grants=schema.GrantStats(live=len(donor.grants), refused=donor.refused),
        mirror=schema.MirrorStats(keys=len(mirror), dropped=mirror.dropped),
        comparison=canary.stats,
        warm_join=warm_join,
        hooks=schema.HookStats(failed=hooks.failed, dropped=hooks.dropped),
        not_sharing=not_sharing,
        refused_posts=refused_posts,
        transfer_pid=process.pid,
        transfer_restarts=max(0, process.starts - 1),
        transfer_failed_calls=process.failed_calls,
    )
