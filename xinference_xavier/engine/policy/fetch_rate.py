"""How long fetches from one peer over one transport take.

A fetch takes an overhead plus a time per row: a line through the latest fetches. While all fetches
had about one size, every line between "only overhead" and "no overhead" fits. The one that predicts
the shortest time is used: optimism leads to a fetch, which is measured; pessimism would prevent it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from xinference_xavier.engine.policy.linear_fit import LinearFit

INFINITE = 1 << 62
"""More rows than exist."""


class Line(NamedTuple):
    """Both in seconds."""

    overhead: float
    per_row: float


class FetchRate:
    """Has no `lines` until the first `add`; then one, or the two extremes that fit."""

    def __init__(self) -> None:
        self.lines: tuple[Line, ...] = ()
        self._fit = LinearFit()  # seconds over rows

    def add(self, rows: int, seconds: float) -> None:
        """Count a fetch of `rows` rows, at least one."""
        self._fit.add(rows, seconds)
        mean_rows, mean_seconds, slope = self._fit.x, self._fit.y, self._fit.slope
        if slope is None:
            self.lines = Line(0.0, mean_seconds / mean_rows), Line(mean_seconds, 0.0)
        else:
            self.lines = (Line(mean_seconds - slope * mean_rows, slope),)

    def seconds(self, rows: int) -> float:
        return min(line.overhead + line.per_row * rows for line in self.lines)

    def rows_within(self, seconds: float) -> int:
        """How many rows a fetch brings in `seconds`; INFINITE if no time per row is known."""
        most = 0
        for overhead, per_row in self.lines:
            if overhead < seconds:
                rows = math.floor((seconds - overhead) / per_row) if per_row else INFINITE
                most = max(most, rows)
        return most
