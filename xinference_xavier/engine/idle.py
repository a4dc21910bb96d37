"""How an idle engine waits while a request waits for a fetch or for a peer.

vLLM would look again at once, or after a millisecond. That costs processor time and Python's lock,
which the fetch itself needs. So the engine waits here instead, for a few milliseconds at most.

Belongs to the scheduler thread.
"""

from __future__ import annotations

import time

from xinference_xavier.tiers.base import Fetch

_MAX_WAIT = 0.005  # seconds for a fetch, at a time


class IdleWait:
    def __init__(self) -> None:
        self._idle = False  # nothing was scheduled in the latest step
        self._begun: Fetch | None = None  # by the latest step
        self._pause = 0.0

    def schedule_ended(self, begun: Fetch | None, pause: float) -> None:
        """The step began the fetch `begun`, if any. `pause` is how many seconds an idle engine may
        sleep."""
        self._idle = False
        self._begun = begun
        self._pause = pause

    def nothing_scheduled(self, fetching: bool) -> None:
        """The engine has nothing to compute. `fetching` says whether a fetch is pending."""
        self._idle = True
        if self._begun is not None:  # leave Python's lock to the thread that runs it
            self._begun.ended.wait(_MAX_WAIT)
        elif not fetching:
            time.sleep(self._pause)

    def before_retry(self, fetch: Fetch | None) -> None:
        """Wait once per step for the fetch that the request needs. If it arrives, the request is
        scheduled one step earlier."""
        if self._idle and fetch is not None:
            self._idle = False
            fetch.ended.wait(_MAX_WAIT)
