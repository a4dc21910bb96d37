"""How an idle engine waits while all of its requests wait for fetches, peers or loads.

vLLM would look again at once, or after a millisecond. That costs processor time and Python's lock,
which the fetch itself needs. So the engine waits here instead, for a few milliseconds at most.

It waits only while nobody else needs its thread: nothing computes, every request that has not ended
waits for us, and no other rank computes in step with it. Whatever reaches the engine ends the wait.

Belongs to the scheduler thread; `Arrivals` also to the worker's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from queue import Queue
from typing import Any

from vllm.config import VllmConfig

from xinference_xavier.engine import compat
from xinference_xavier.engine.jobs import Jobs
from xinference_xavier.tiers.base import Fetch

_MAX_WAIT = 0.005  # seconds for a fetch, at a time
_SLICE = 0.001  # seconds until an arrival is noticed; vLLM pauses as long between two empty steps


class Arrivals:
    """What reached the engine and vLLM has not looked at yet: requests, aborts, calls.

    Where `received` is not known, no wait is longer than vLLM's own pause.
    """

    def __init__(self, received: Queue[Any] | None) -> None:
        self._received = received

    @classmethod
    def at(cls, config: VllmConfig) -> Arrivals | None:
        """Of the engine that is being made on this thread. None if it must not wait, because others
        compute in step with it."""
        parallel = config.parallel_config
        if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
            return None
        return cls(getattr(compat.engine_core(), "input_queue", None))

    def wait(self, ended: Callable[[float], object], seconds: float) -> None:
        """Wait until something arrives, for `seconds` at most, or until `ended` is true, which
        itself waits for as many seconds as it is told."""
        if self._received is None:
            ended(min(seconds, _SLICE))
            return
        until = time.monotonic() + seconds
        while self._received.empty() and (left := until - time.monotonic()) > 0:
            if ended(min(left, _SLICE)):
                return


class IdleWait:
    def __init__(self) -> None:
        self.arrivals: Arrivals | None = None
        """None: this engine never waits."""
        self._idle = False  # since the latest step
        self._deferred: Set[str] = frozenset()
        self._begun: Fetch | None = None
        self._pause = 0.0

    def pass_ended(self, deferred: Set[str], begun: Fetch | None, pause: float) -> None:
        """The scheduling attempt deferred these requests and began the fetch `begun`, if any.
        `pause` is how many seconds an idle engine may sleep."""
        self._idle = False
        self._deferred, self._begun, self._pause = deferred, begun, pause

    def nothing_runs(self, requests: Set[str], jobs: Jobs) -> bool:
        """Wait if all `requests`, which are those that have not ended, do so too.

        Returns whether the workers may wait for their loads. Then this step goes on, because it may
        be what hands them over.
        """
        loading = jobs.requests_loading
        if self.arrivals is None or not requests - loading <= self._deferred:
            return False
        if jobs:
            return bool(loading)
        self._idle = True
        if self._begun is not None:  # leave Python's lock to the thread that runs it
            self.arrivals.wait(self._begun.ended.wait, _MAX_WAIT)
        elif self._pause:
            self.arrivals.wait(threading.Event().wait, self._pause)
        return False

    def before_lookups(self, requests: Set[str], pending: Fetch | None) -> None:
        """Wait for the fetch that the first request of the queue needs. If it arrives, the request
        is scheduled one step earlier."""
        idle, self._idle = self._idle, False  # a request behind it may find the engine busy
        if idle and pending and self.arrivals is not None and requests <= self._deferred:
            self.arrivals.wait(pending.ended.wait, _MAX_WAIT)
