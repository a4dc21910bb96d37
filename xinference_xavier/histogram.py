"""Observations counted by size, in the buckets that our metrics have. For one thread.

Whoever counts and whoever shows it know the bounds, so that only counts travel.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Of how long a fetch takes; `xavier_fetch_timeout` is 5 s unless it is set."""
BYTES_BOUNDS = tuple(float(1 << power) for power in range(16, 34, 2))
"""Of what a fetch brings: 64 KiB to 4 GiB."""


class Histogram:
    """`counts` has one more entry than `bounds`, for what is above all of them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """A value that equals a bound is not above it."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"counts": list(self.counts), "sum": self.sum}
