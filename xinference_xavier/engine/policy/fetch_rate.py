"""How long fetches from one peer over one transport take, learnt from those that there were.

A fetch of so many rows takes an overhead and so much for each row: a line through the last fetches,
the newer ones counting more. While all of them were of about one size, any line between
"overhead only" and "rows only" would do, and the one that promises the least time is taken: what is
too hopeful makes a fetch, which is measured; what is too gloomy would prevent it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from xinference_xavier.engine.policy.linear_fit import LinearFit

NEVER = 1 << 62
"""More chunks than there are."""


class Line(NamedTuple):
    """Both in seconds."""

    overhead: float
    each: float


class FetchRate:
    def __init__(self) -> None:
        self.lines: tuple[Line, ...] = ()
        """Of the one or two that could be true; none before the first fetch."""
        self._trend = LinearFit()  # of seconds over rows

    def add(self, rows: int, seconds: float) -> None:
        """A fetch brought `rows`, at least one, in so many seconds."""
        self._trend.add(rows, seconds)
        self.lines = self._possible()

    def _possible(self) -> tuple[Line, ...]:
        rows, seconds, each = self._trend.x, self._trend.y, self._trend.slope
        if each is None:
            return Line(0.0, seconds / rows), Line(seconds, 0.0)
        return (Line(seconds - each * rows, each),)

    def seconds(self, rows: int) -> float:
        return min(line.overhead + line.each * rows for line in self.lines)

    def least(self, rows_per_chunk: int, chunk_seconds: float) -> int:
        """The smallest number of chunks, each of so many rows, that take less time to be fetched
        than `chunk_seconds` each; NEVER if no number does."""
        found = NEVER
        for overhead, each in self.lines:
            saved = chunk_seconds - each * rows_per_chunk
            if saved > 0:
                found = min(found, math.floor(overhead / saved) + 1)
        return found

    def rows_within(self, seconds: float) -> int:
        """How many rows can be had in so many seconds."""
        most = 0
        for overhead, each in self.lines:
            if overhead < seconds:
                most = max(most, math.floor((seconds - overhead) / each) if each else NEVER)
        return most
