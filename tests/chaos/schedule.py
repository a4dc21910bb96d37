"""Which faults occur, where and in which order: pure data that follows from a seed.

A schedule has no end; a run takes a prefix of it. The steps of one lane (a replica's or the
tracker's) are carried out one after the other, those of different lanes at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

TRACKER = "tracker"
"""The lane for faults of the tracker, or of all replicas together."""

REPLICA_KINDS: Mapping[str, int] = {
    "damaged row": 60,
    "swapped rows": 50,
    "late bytes": 25,
    "too many bytes": 8,
    "link refused": 40,
    "stranger": 30,
    "consumer's transfer process killed": 8,
    "donor stalls": 30,
    "too few rows": 30,
    "donor is slow": 50,
    "link cut": 40,
    "donor's transfer process killed": 8,
    "data port closed": 12,
    "transfer process stopped": 12,
    "replica killed": 10,
    "replica stopped for a moment": 20,
    "replica stopped beyond the deadline": 12,
    "replica stopped beyond the lease": 8,
    "donor busy": 40,
    "stale entries": 60,
    "pool full": 40,
    "request aborted while it waits": 70,
    "no room after a hit": 70,
    "request preempted": 60,
    "store fails": 50,
    "reset while fetching": 30,
    "reset while serving": 30,
    "rows of other weights": 15,
    "wrong sketch": 15,
}
"""Kinds of faults of one replica, and how often each occurs relative to the others."""

TRACKER_KINDS: Mapping[str, int] = {
    "publication lost": 24,
    "publication repeated": 24,
    "publication delayed": 20,
    "clock jumps ahead": 12,
    "clock jumps back": 12,
    "tracker stopped beyond the lease": 10,
    "tracker killed": 10,
    "tracker moved": 10,
    "sharing switched off and on": 12,
    "other weights": 10,
}

_TRACKER_SHARE = 0.12  # of all steps: they take seconds and share one lane


class Step(NamedTuple):
    """The step's lane waits `pause` seconds before it; `strength`, 0 to 1, says how long or how
    severe the fault is."""

    number: int
    kind: str
    target: str
    pause: float
    strength: float


def schedule(
    seed: int, replicas: Sequence[str], only: Sequence[str] | None = None
) -> Iterator[Step]:
    """`only` restricts it to some kinds. Raises ValueError for an unknown one."""
    unknown = set(only or ()) - REPLICA_KINDS.keys() - TRACKER_KINDS.keys()
    if unknown:
        raise ValueError(f"no such kinds of faults: {sorted(unknown)}")
    of_replicas, of_tracker = _chosen(REPLICA_KINDS, only), _chosen(TRACKER_KINDS, only)
    share = _TRACKER_SHARE if of_replicas else 1.0
    source = random.Random(seed)
    number = 0
    while True:
        number += 1
        to_tracker = bool(of_tracker) and source.random() < share
        kinds = of_tracker if to_tracker else of_replicas
        kind = source.choices(list(kinds), list(kinds.values()))[0]
        target = TRACKER if to_tracker else source.choice(replicas)
        yield Step(number, kind, target, source.uniform(0.0, 0.3), source.random())


def _chosen(kinds: Mapping[str, int], only: Sequence[str] | None) -> dict[str, int]:
    return {kind: weight for kind, weight in kinds.items() if only is None or kind in only}
