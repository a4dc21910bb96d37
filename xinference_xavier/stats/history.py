"""What a model's sharing amounted to over the last hour. Pure: no I/O, no clock of its own.

A sample sums up what every replica counted since its start, also of those that are gone: the sums
never fall while one tracker lives, so that a rate is the difference of two samples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from xinference_xavier.stats.schema import mapping, number

INTERVAL = 10.0
"""Seconds between two samples."""
MAX_SAMPLES = 360
MAX_REMEMBERED = 1000
"""Replicas whose figures are kept one by one; those of the oldest become one figure."""

HIT_SOURCES = ("prefix_cache", "local_pool", "remote", "computed")
_COUNTS = ("bytes_received", "requests", "seconds_saved")
_FETCH_COUNTS = ("started", "committed")

_Figures = tuple[float, ...]


class History:
    """`note` what each replica reports, `tick` often: every `INTERVAL` it takes a sample."""

    def __init__(self) -> None:
        self._latest: dict[str, _Figures] = {}
        self._forgotten: _Figures = _figures({})
        self._samples: deque[tuple[float, _Figures]] = deque(maxlen=MAX_SAMPLES)
        self._due = -math.inf

    def record(self, incarnation: str, stats: Mapping[str, Any]) -> None:
        """`stats` are what a replica counted since its start, as it reports them."""
        self._latest.pop(incarnation, None)
        self._latest[incarnation] = _figures(stats)
        if len(self._latest) > MAX_REMEMBERED:
            oldest = self._latest.pop(next(iter(self._latest)))
            self._forgotten = _sum(self._forgotten, oldest)

    def tick(self, now: float, time: float) -> None:
        """`now` is in monotonic seconds, `time` in seconds since 1970."""
        if now >= self._due:
            self._due = now + INTERVAL
            self._samples.append((time, _sum(self._forgotten, *self._latest.values())))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the oldest sample comes first."""
        return {
            "interval_s": INTERVAL,
            "samples": [_sample(time, figures) for time, figures in self._samples],
        }


def _figures(stats: Mapping[str, Any]) -> _Figures:
    """What is missing, or no number, counts nothing: it comes from peers."""
    hits, fetches = mapping(stats.get("hits")), mapping(stats.get("fetches"))
    return (
        *(number(hits.get(source)) for source in HIT_SOURCES),
        *(number(stats.get(name)) for name in _COUNTS),
        *(number(fetches.get(name)) for name in _FETCH_COUNTS),
        sum(map(number, mapping(fetches.get("rolled_back")).values())),
    )


def _sample(time: float, figures: _Figures) -> dict[str, Any]:
    rest = iter(figures)
    return {
        "time": time,
        "hits": {source: next(rest) for source in HIT_SOURCES},
        **{name: next(rest) for name in (*_COUNTS, *_FETCH_COUNTS, "rolled_back")},
    }


def _sum(*figures: _Figures) -> _Figures:
    return tuple(map(sum, zip(*figures, strict=True)))
