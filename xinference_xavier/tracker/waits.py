"""How many calls wait at the tracker, and how long. For one event loop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from xinference_xavier.checks import shown
from xinference_xavier.tracker.namespaces import MAX_MEMBERS
from xinference_xavier.tracker.protocol import TrackerFullError

MAX_WATCHES = 4 * MAX_MEMBERS
"""That wait at a time; a member has one, and for a moment those that it gave up."""
MAX_WATCH = 60.0
"""Seconds that a watch waits at most, whatever it asks for."""


class Waits:
    """`count` wait now, `refused` were too many."""

    def __init__(self) -> None:
        self.count = 0
        self.refused = 0

    @contextlib.contextmanager
    def one_more(self, timeout: float) -> Iterator[float]:
        """It may wait for as many seconds as this gives. Raises ValueError, TrackerFullError."""
        if not isinstance(timeout, (int, float)) or not abs(timeout) < math.inf:
            raise ValueError(f"timeout={shown(timeout)} is not a number of seconds")
        if self.count >= MAX_WATCHES:
            self.refused += 1
            raise TrackerFullError(f"{MAX_WATCHES} watches wait for news of this model already")
        self.count += 1
        try:
            yield max(0.0, min(timeout, MAX_WATCH))
        finally:
            self.count -= 1
