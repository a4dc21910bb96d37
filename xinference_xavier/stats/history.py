"""A model's sharing over the last hour. Pure: no I/O, no clock of its own.

A sample sums up what all replicas counted since their start, including those that left. Sums never
fall while one tracker lives, so the difference of two samples is a rate.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from xinference_xavier.stats.reading import add, read
from xinference_xavier.stats.schema import Counters

INTERVAL = 10.0
"""Seconds between two samples."""
MAX_SAMPLES = 360
MAX_REMEMBERED = 1000
"""Replicas whose counters are kept apart; older ones are added up."""
ANY_REASON = "any"
"""Stands for all reasons of rollbacks, because peers could invent any number of them."""


class History:
    """Call `tick` often: it takes a sample every `INTERVAL`."""

    def __init__(self) -> None:
        self._latest: dict[str, Counters] = {}
        self._forgotten = Counters()
        self._samples: deque[dict[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._due = -math.inf

    def record(self, incarnation: str, stats: Mapping[str, Any]) -> None:
        """Keep what a replica counted since its start; `stats` are as it reports them."""
        counters = read(Counters, stats)
        rolled_back = sum(counters.fetches.rolled_back.values())
        counters.fetches.rolled_back = {ANY_REASON: rolled_back}
        self._latest.pop(incarnation, None)
        self._latest[incarnation] = counters
        if len(self._latest) > MAX_REMEMBERED:
            add(self._forgotten, self._latest.pop(next(iter(self._latest))))

    def tick(self, now: float, time: float) -> None:
        """`now` is in monotonic seconds, `time` in seconds since 1970."""
        if now >= self._due:
            self._due = now + INTERVAL
            total = Counters()
            for counters in (self._forgotten, *self._latest.values()):
                add(total, counters)
            self._samples.append({"time": time, **asdict(total)})

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. Samples have `time` and the fields of `Counters`; the oldest comes first."""
        return {"interval_s": INTERVAL, "samples": list(self._samples)}
