"""What an engine without work does while a request waits for a fetch or for a peer.

vLLM asks again at once, or after a millisecond. That costs processor time and Python's lock, which
the fetch itself needs. So an idle engine waits here instead, a few milliseconds at most.

Belongs to the scheduler thread.
"""

from __future__ import annotations

import time

from xinference_xavier.tiers.base import Fetch

_POLL = 0.005  # seconds between two looks at a fetch, at most


class IdleWait:
    def __init__(self) -> None:
        self._idle = False  # nothing was scheduled in the last step
        self._begun: Fetch | None = None  # in this step
        self._pause = 0.0

    def schedule_ended(self, begun: Fetch | None, pause: float) -> None:
        """The step began the fetch `begun`, if any. `pause` is how many seconds the requests that
        wait for peers can spare."""
        self._idle = False
        self._begun = begun
        self._pause = pause

    def nothing_scheduled(self, fetching: bool) -> None:
        """The engine is idle; `fetching` says whether any fetch is pending."""
        self._idle = True
        if self._begun is not None:  # let its thread have Python's lock
            self._begun.ended.wait(_POLL)
        elif not fetching:
            time.sleep(self._pause)

    def before_retry(self, fetch: Fetch | None) -> None:
        """Wait once per step for the fetch that the request needs: otherwise the request is
        scheduled a whole step later."""
        if self._idle and fetch is not None:
            self._idle = False
            fetch.ended.wait(_POLL)
