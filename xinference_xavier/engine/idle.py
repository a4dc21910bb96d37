"""Waiting of an engine that has only requests that wait themselves.

`IdleWait` blocks an engine for a few milliseconds at most. Without it, vLLM would look again at
once, or after a millisecond, which costs processor time and Python's lock, and the fetch itself
needs both. It blocks only while nothing else needs the thread: nothing computes, every unfinished
request waits for us, and no other rank computes in step with this one. Whatever reaches the engine
ends the wait. Where vLLM's input queue is not found, only these milliseconds are lost.

Belongs to the scheduler thread; `Arrivals` also to the worker's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set
from queue import Queue
from typing import Any, NamedTuple

from vllm.config import VllmConfig

from xinference_xavier.engine import compat
from xinference_xavier.replica.fetcher import Fetch

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
        """The arrivals of the engine that is being made on this thread. None if it must not wait,
        because other ranks compute in step with it."""
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


class PassEnd(NamedTuple):
    """One scheduling attempt deferred these requests and began the fetch `begun`, if any. An idle
    engine may sleep for `pause` seconds."""

    deferred: Set[str] = frozenset()
    begun: Fetch | None = None
    pause: float = 0.0


NOTHING = PassEnd()
"""There was nothing to do."""


class IdleWait:
    """Without `arrivals`, the engine never waits: a remote hit of 8,000 tokens takes 14 % longer
    (5 to 23 %; a model of 26 million parameters, two cores, 12 pairs)."""

    def __init__(self, arrivals: Arrivals | None) -> None:
        self._arrivals = arrivals
        self._idle = False  # since the latest step
        self._last = NOTHING

    def pass_ended(self, end: PassEnd) -> None:
        self._idle = False
        self._last = end

    def nothing_runs(self, requests: Set[str], loading: Set[str], copying: bool) -> bool:
        """Block briefly if every one of the unfinished `requests` is itself waiting. `loading` are
        those with a load under way; the workers are `copying` if they load or store anything.

        Returns whether the workers may block for their loads instead: then this step must go on,
        because it may be the one that hands the loads over.
        """
        if self._arrivals is None or not requests - loading <= self._last.deferred:
            return False
        if copying:
            return bool(loading)
        self._idle = True
        if self._last.begun is not None:  # leave Python's lock to the thread that runs it
            self._arrivals.wait(self._last.begun.ended.wait, _MAX_WAIT)
        elif self._last.pause:
            self._arrivals.wait(threading.Event().wait, self._last.pause)
        return False

    def before_lookups(self, requests: Set[str], pending: Fetch | None) -> None:
        """Wait for the fetch that the first request of the queue needs. If it arrives, the request
        is scheduled one step earlier."""
        idle, self._idle = self._idle, False  # a request behind it may find the engine busy
        if idle and pending and self._arrivals is not None and requests <= self._last.deferred:
            self._arrivals.wait(pending.ended.wait, _MAX_WAIT)
