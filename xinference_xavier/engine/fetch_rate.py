"""How long fetches from one peer over one transport take, learnt from those that there were.

A fetch of so many rows takes an overhead and so much for each row: a line through the last fetches,
the newer ones counting more. While all of them were of about one size, any line between
"overhead only" and "rows only" would do, and the one that promises the least time is taken: what is
too hopeful makes a fetch, which is measured; what is too gloomy would prevent it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_WEIGHT = 0.2  # of the newest fetch: about the last ten count
_SAME_SIZE = 0.05  # variance of sizes, in squares of their mean

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
        self._count = 0
        self._rows = 0.0  # their mean, and so on
        self._seconds = 0.0
        self._variance = 0.0  # of the rows
        self._covariance = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A fetch brought `rows`, at least one, in so many seconds."""
        self._count += 1
        weight = max(_WEIGHT, 1 / self._count)
        more_rows, more_seconds = rows - self._rows, seconds - self._seconds
        self._rows += weight * more_rows
        self._seconds += weight * more_seconds
        self._variance = (1 - weight) * (self._variance + weight * more_rows**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_rows * more_seconds)
        self.lines = self._possible()

    def _possible(self) -> tuple[Line, ...]:
        most = self._seconds / self._rows
        if self._variance <= _SAME_SIZE * self._rows**2:
            return Line(0.0, most), Line(self._seconds, 0.0)
        each = min(max(self._covariance / self._variance, 0.0), most)
        return (Line(self._seconds - each * self._rows, each),)

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
