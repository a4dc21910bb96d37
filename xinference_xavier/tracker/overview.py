"""A model's namespaces as its operators see them: who is there, with figures as they are now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from xinference_xavier.tracker.asking import stats_of_all
from xinference_xavier.tracker.index import ReplicaState
from xinference_xavier.tracker.namespaces import Namespace, Namespaces


async def overview(
    namespaces: Namespaces, name_of: Callable[[str], str], now: float
) -> dict[str, dict[str, Any]]:
    """JSON-able, by namespace. `stale` marks figures of the last heartbeat, of a replica that did
    not answer in time."""
    present = dict(namespaces.items())
    described = await asyncio.gather(
        *(_describe(known, name_of, now) for known in present.values())
    )
    return dict(zip(present, described, strict=True))


async def _describe(known: Namespace, name_of: Callable[[str], str], now: float) -> dict[str, Any]:
    replicas = known.index.replicas(now)
    keys, revision = known.index.distinct_keys(), known.index.revision
    answers = await stats_of_all([state.member for state in replicas])
    described = [
        _describe_replica(
            state,
            name_of(state.member.incarnation),
            {**known.stats.get(state.member.incarnation, {}), "stale": True}
            if stats is None
            else stats,
        )
        for state, stats in zip(replicas, answers, strict=True)
    ]
    return {"revision": revision, "keys": keys, "replicas": described}


def _describe_replica(state: ReplicaState, name: str, stats: dict[str, Any]) -> dict[str, Any]:
    return {
        "incarnation": state.member.incarnation,
        "address": state.member.address,
        "replica": name,
        "holdings": state.holdings,
        "sequence": state.sequence,
        "lease_left_s": round(state.lease_left, 3),
        "stats": stats,
    }
