"""A replica's figures since its start, as the tracker gets them with heartbeats."""

from __future__ import annotations

from typing import Any

from xinference_xavier.pool.pool import Pool
from xinference_xavier.replica.donor import Donor
from xinference_xavier.replica.fetcher import FetchCounts
from xinference_xavier.replica.mirror import Mirror
from xinference_xavier.replica.transfer_process import TransferProcess

_MAX_DONORS = 100  # that figures name


def replica_stats(
    counts: FetchCounts,
    *,
    row_bytes: int,
    pool: Pool,
    donor: Donor,
    mirror: Mirror,
    process: TransferProcess,
) -> dict[str, Any]:
    """JSON-able; asks nobody. Of all but the engine."""
    return {
        "bytes_received": counts.rows * row_bytes,
        "received_from": {
            name: rows * row_bytes for name, rows in counts.received.most_common(_MAX_DONORS)
        },
        "fetching": dict(counts.in_flight.most_common(_MAX_DONORS)),
        "fetches": {
            "started": counts.started,
            "committed": counts.committed,
            "rolled_back": dict(counts.rolled_back),
            "by_transport": {
                name: figures.to_dict() for name, figures in counts.by_transport.items()
            },
        },
        "pool": pool.counts()._asdict() | {"row_bytes": row_bytes},
        "grants": {"live": len(donor.grants), "refused": donor.refused},
        "mirror": {"keys": len(mirror), "dropped": mirror.dropped},
        "transfer_restarts": max(0, process.starts - 1),
        "transfer_pid": process.pid,
    }
