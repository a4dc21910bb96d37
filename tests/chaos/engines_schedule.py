"""The order of faults for a model's replicas: pure data that follows from a seed.

Killed replicas take a minute or more to return, so each `HEAVY` step is followed by `LIGHT` ones,
which hit the others meanwhile. `STEADY` ones need all replicas, too, but bring none down. A
schedule has no end; a run takes a prefix of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.faults import Order

ADDED = "replica added"
REMOVED = "replica removed"
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


class Step(NamedTuple):
    """`strength`, in [0, 1), has a meaning of its own for each kind."""

    number: int
    kind: str
    strength: float


def schedule(seed: int) -> Iterator[Step]:
    """All light and steady kinds with two replicas, then a third replica, then heavy and steady
    kinds in turn."""
    source = random.Random(seed)
    for number, kind in enumerate(_kinds(source), 1):
        yield Step(number, str(kind), source.random())


def _kinds(source: random.Random) -> Iterator[str]:
    yield from source.sample([*STEADY, *LIGHT], len(STEADY) + len(LIGHT))
    yield ADDED
    yield from _light(source)
    while True:
        for kind in source.sample([*HEAVY, *STEADY], len(HEAVY) + len(STEADY)):
            yield kind
            yield from _light(source)
        yield REMOVED
        yield ADDED
        yield from _light(source)


def _light(source: random.Random) -> list[str]:
    return source.choices(list(LIGHT), list(LIGHT.values()), k=_BETWEEN)
