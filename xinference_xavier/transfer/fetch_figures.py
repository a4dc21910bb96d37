"""How long fetches took, what they brought and why they failed, by transport. For one thread."""

from __future__ import annotations

from collections import Counter
from typing import Any

from xinference_xavier.histogram import BYTES_BOUNDS, SECONDS_BOUNDS, Histogram

COMMITTED, ROLLED_BACK = OUTCOMES = ("committed", "rolled_back")


class FetchFigures:
    """Of the fetches over one transport; or of those that ended before one was chosen."""

    def __init__(self) -> None:
        self._seconds = {outcome: Histogram(SECONDS_BOUNDS) for outcome in OUTCOMES}
        self._bytes = Histogram(BYTES_BOUNDS)
        self._reasons: Counter[str] = Counter()

    def ended(self, reason: str | None, seconds: float, size: int) -> None:
        """After `seconds`, with `size` bytes that became hits; `reason` is why not all did."""
        self._seconds[COMMITTED if reason is None else ROLLED_BACK].observe(seconds)
        if reason is not None:
            self._reasons[reason] += 1
        if size:
            self._bytes.observe(size)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. `bytes` counts the fetches that brought some, `reasons` those that did not
        bring all."""
        return {
            "seconds": {outcome: seen.to_dict() for outcome, seen in self._seconds.items()},
            "bytes": self._bytes.to_dict(),
            "reasons": dict(self._reasons),
        }
