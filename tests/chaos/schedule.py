"""Which faults occur, where and in which order: pure data that follows from a seed.

A schedule has no end; a run takes a prefix of it.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.chaos.disk import KINDS as DISK_KINDS
from tests.faults import Order


class Step(NamedTuple):
    """`strength`, in [0, 1), says how long or how severe the fault is, or where it strikes.

    The replicas' part has lanes: `target` is a replica or `TRACKER`, and its lane waits `pause`
    seconds before the step.
    """

    number: int
    kind: str
    strength: float
    target: str = ""
    pause: float = 0.0


# -- for replicas -----------------------------------------------------------------------------
# The steps of one lane are carried out one after the other, those of different lanes at the same
# time.

TRACKER = "tracker"
"""The lane for faults of the tracker, of the disk, or of all replicas together."""

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
    "replica drained": 12,
    "replica killed while it drains": 10,
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
    "tracker killed while a replica drains": 10,
    "sharing switched off and on": 12,
    "other weights": 10,
    **dict.fromkeys(DISK_KINDS, 10),
}

_TRACKER_SHARE = 0.22  # of all steps: they take seconds and share one lane


def of_replicas(
    seed: int, replicas: Sequence[str], only: Sequence[str] | None = None
) -> Iterator[Step]:
    """`only` restricts it to some kinds. Raises ValueError for an unknown one."""
    unknown = set(only or ()) - REPLICA_KINDS.keys() - TRACKER_KINDS.keys()
    if unknown:
        raise ValueError(f"no such kinds of faults: {sorted(unknown)}")
    of_one, of_tracker = _chosen(REPLICA_KINDS, only), _chosen(TRACKER_KINDS, only)
    share = _TRACKER_SHARE if of_one else 1.0
    source = random.Random(seed)
    number = 0
    while True:
        number += 1
        to_tracker = bool(of_tracker) and source.random() < share
        kinds = of_tracker if to_tracker else of_one
        kind = source.choices(list(kinds), list(kinds.values()))[0]
        target = TRACKER if to_tracker else source.choice(replicas)
        pause, strength = source.uniform(0.0, 0.3), source.random()
        yield Step(number, kind, strength, target, pause)


def _chosen(kinds: Mapping[str, int], only: Sequence[str] | None) -> dict[str, int]:
    return {kind: weight for kind, weight in kinds.items() if only is None or kind in only}


# -- for engines ------------------------------------------------------------------------------
# Killed replicas take a minute or more to return, so each `HEAVY` step is followed by `LIGHT` ones,
# which hit the others meanwhile. `STEADY` ones need all replicas, too, but bring none down.

ADDED = "replica added"
REMOVED = "replica removed"
REMOVED_MEANWHILE = "tracker destroyed while a replica drains"
REMOVALS = (REMOVED, REMOVED_MEANWHILE)
HEAVY = (
    "engine killed",
    "model process killed",
    "worker process killed",
    "vLLM's cache reset",
    "all caches reset",
)
STEADY = ("supervisor relaunched", "API relaunched", "disk full", "unreadable image")
LIGHT: Mapping[str, int] = {
    # All replicas read the same orders, so a port cannot be closed for one of them.
    **dict.fromkeys((each for each in Order if each is not Order.CLOSED), 2),
    Order.OVERSIZE: 1,
    Order.DIE_RECEIVING: 1,
    Order.DIE_SENDING: 1,
    "transfer process killed": 1,
    "transfer process stopped": 2,
    "engine stopped beyond the lease": 1,
    "tracker destroyed": 1,
    "sharing switched off and on": 1,
    "request aborted": 4,
    "request aborted while it waits": 2,
}
"""How often each kind occurs, relative to the others."""
_BETWEEN = 7
"""Light steps while a replica is on its way back."""


def of_engines(seed: int) -> Iterator[Step]:
    """All light and steady kinds with two replicas, then a third replica, then heavy and steady
    kinds in turn."""
    source = random.Random(seed)
    for number, kind in enumerate(_for_engines(source), 1):
        yield Step(number, str(kind), source.random())


def _for_engines(source: random.Random) -> Iterator[str]:
    yield from source.sample([*STEADY, *LIGHT], len(STEADY) + len(LIGHT))
    yield ADDED
    yield from _light(source)
    while True:
        for kind in source.sample([*HEAVY, *STEADY], len(HEAVY) + len(STEADY)):
            yield kind
            yield from _light(source)
        yield source.choice(REMOVALS)
        yield ADDED
        yield from _light(source)


def _light(source: random.Random) -> list[str]:
    return source.choices(list(LIGHT), list(LIGHT.values()), k=_BETWEEN)
