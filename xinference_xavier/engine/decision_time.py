"""How long requests wait for the decision on what peers hold.

Belongs to the scheduler thread; `longest` may be read by any. Times are monotonic seconds. A busy
engine looks at a waiting request only between two steps, so steps that compute something are not
counted: what is left is the time that the request lost to us.
"""

from __future__ import annotations


class DecisionTime:
    def __init__(self) -> None:
        self.longest = 0.0
        """From a request's first pending lookup to its decision."""
        self._computed = 0.0  # seconds that all steps took so far
        self._began: float | None = None  # of the step that is being computed
        self._tokens = 0

    def step_begins(self, tokens: int, now: float) -> None:
        """A step with so many tokens was scheduled."""
        self.idle_time(now)
        # It may have been scheduled while the one before it is still being computed.
        if tokens or self._tokens:
            self._began = now
        self._tokens = tokens

    def idle_time(self, now: float) -> float:
        """A clock that stood still while the engine was computing; for the next lookup after it."""
        if self._began is not None:
            self._computed += now - self._began
            self._began = None
        return now - self._computed

    def decided(self, since: float, now: float) -> None:
        """A request was, that is pending since `idle_time` was `since`."""
        self.longest = max(self.longest, self.idle_time(now) - since)
