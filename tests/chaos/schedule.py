"""Which faults occur, where and in which order: pure data that follows from a seed.

A schedule has no end; a run takes a prefix of it.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.faults import Order

Weights = Mapping[str, int]
"""Kinds of faults, and how often each occurs relative to the others."""


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

_TRACKER_SHARE = 0.22  # of all steps: they take seconds and share one lane


def of_replicas(
    seed: int, replicas: Sequence[str], of_one: Weights, of_tracker: Weights
) -> Iterator[Step]:
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
        yield Step(number, str(kind), strength, target, pause)


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
LIGHT: Weights = {
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
