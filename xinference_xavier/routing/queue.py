"""Requests that wait because every replica has as many as it accepts.

They leave in order of arrival, and at any time if they have waited for too long or their client has
gone. Pure: times are passed in, in monotonic seconds. Belongs to one thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

_MEASURED = 20  # admissions that the estimate is made from


class Queue:
    """At most `bound` requests wait, each for at most `patience` seconds."""

    def __init__(self, bound: int, patience: float) -> None:
        self.bound = bound
        self.patience = patience
        self._arrived: OrderedDict[str, float] = OrderedDict()
        self._admitted: deque[float] = deque(maxlen=_MEASURED)

    def __len__(self) -> int:
        return len(self._arrived)

    def join(self, request: str, now: float) -> bool:
        """False if the queue is full: the request is refused."""
        if len(self._arrived) >= self.bound:
            return False
        self._arrived[request] = now
        return True

    def leave(self, request: str) -> None:
        """It has waited for too long, or its client has gone. Does nothing for one that does not
        wait."""
        self._arrived.pop(request, None)

    @property
    def first(self) -> str:
        """The request that is admitted next; empty if none waits."""
        return next(iter(self._arrived), "")

    def admit(self, now: float) -> float:
        """A replica takes the first request, which leaves the queue. Returns for how many seconds
        it waited. Raises KeyError if none waits."""
        _, arrived = self._arrived.popitem(last=False)
        self._admitted.append(now)
        return max(0.0, now - arrived)

    def retry_after(self, now: float) -> int:
        """Seconds after which a refused client may find a place: as long as those that wait now
        will take at the pace of the latest admissions. At least one, at most the patience."""
        longest = max(1, math.ceil(self.patience))
        if len(self._admitted) < 2:
            return longest
        pace = (now - self._admitted[0]) / len(self._admitted)
        return min(longest, max(1, math.ceil(pace * max(1, len(self._arrived)))))
