"""Which faults occur, where and in which order: pure data that follows from a seed.

A schedule has no end; a run takes a prefix of it.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Weights = Mapping[str, int]
"""Kinds of faults, and how often each occurs relative to the others."""


class Step(NamedTuple):
    """`strength`, in [0, 1), says how long or how severe the fault is, or where it strikes.

    `target` is a lane, that of a replica or `TRACKER`, which waits `pause` seconds before the step.
    The steps of one lane are carried out one after the other, those of different lanes at the same
    time.
    """

    number: int
    kind: str
    strength: float
    target: str
    pause: float


TRACKER = "tracker"
"""The lane for faults of the tracker, of the disk, or of all replicas together."""

_TRACKER_SHARE = 0.22  # of all steps: they take seconds and share one lane


def schedule(
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
