"""Waiting: of a request for a peer that computes its prefix, and of an engine that has only such
requests.

A `Wait` goes on as long as the peer keeps up with what the request's own engine would have
computed. The peer may be two steps behind, because it publishes a step's chunks only after the next
step, and a quarter of the whole. However the wait ends, the chunks that have arrived are used.

`IdleWait` blocks an engine for a few milliseconds at most. Without it, vLLM would look again at
once, or after a millisecond, which costs processor time and Python's lock, and the fetch itself
needs both. It blocks only while nothing else needs the thread: nothing computes, every unfinished
request waits for us, and no other rank computes in step with this one. Whatever reaches the engine
ends the wait. Where vLLM's input queue is not found, only these milliseconds are lost.

Belongs to the scheduler thread; `Arrivals` also to the worker's. Any thread may read the counts.
Times are monotonic seconds.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Set
from queue import Queue
from typing import Any

from vllm.config import VllmConfig

from xinference_xavier.engine import compat
from xinference_xavier.pool.tier import Claim, Fetch
from xinference_xavier.stats.schema import WaitCounts

MIN_PREFILL_SECONDS = 1.0
"""About two hundred round trips to the tracker."""
_POLLS_PER_STEP = 50
_MAX_PAUSE = 0.05
_ANSWER_TIMEOUT = 1.0  # only for a loop that hangs: the replica gives up earlier
_STEPS_BEHIND = 2
_SLACK = 0.25


class Wait:
    """One request's wait, which begins `now`.

    `local_seconds(n)` is how long the request's own engine takes for the first n chunks. It
    computes `step` chunks at a time.
    """

    def __init__(
        self, claim: Claim, local_seconds: Callable[[int], float], step: int, now: float
    ) -> None:
        self.claim = claim
        self.peer = ""
        """The peer that computes the keys, if a router has named it."""
        self.head_start = 0.0  # seconds that the peer may begin later than this engine would
        self._began = now
        self._local_seconds = local_seconds
        self._step = step
        self.pause = min(local_seconds(step) / _POLLS_PER_STEP, _MAX_PAUSE)
        """Seconds that an idle engine sleeps before it looks again. vLLM's own millisecond costs
        processor time that the peer may need."""
        self._computed = 0  # leading chunks
        self._gave_up = False
        self._is_counted = False

    @property
    def leaves_it_to_peer(self) -> bool:
        """Whether the peer was told to compute, and this engine expects that it does."""
        return bool(self.peer) and not (self._gave_up or self._is_counted)

    def goes_on(self, is_computed: Callable[[bytes], bool], now: float) -> bool:
        """Whether the request should go on waiting."""
        held_by_peer = self.claim.held_by_peer
        if held_by_peer is None:
            return now < self._began + _ANSWER_TIMEOUT
        rest = itertools.islice(self.claim.keys, self._computed, held_by_peer)
        self._computed += sum(1 for _ in itertools.takewhile(is_computed, rest))
        if self._computed >= held_by_peer:
            return False
        allowed = min(self._computed + _STEPS_BEHIND * self._step, len(self.claim.keys))
        own = self.head_start + self._local_seconds(allowed)
        self._gave_up = now >= self._began + own + _SLACK * self.claim.seconds
        return not self._gave_up

    def count(self, counts: WaitCounts) -> None:
        """The request is scheduled or over; further calls do nothing."""
        if self._is_counted:
            return
        self._is_counted = True
        if not self.claim.held_by_peer:
            counts.claimed += 1
            return
        counts.waited += 1
        counts.given_up += self._gave_up


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


class IdleWait:
    """Without `arrivals`, the engine never waits."""

    def __init__(self, arrivals: Arrivals | None) -> None:
        self._arrivals = arrivals
        self._idle = False  # since the latest step
        self._deferred: Set[str] = frozenset()
        self._begun: Fetch | None = None
        self._pause = 0.0

    def pass_ended(self, deferred: Set[str], begun: Fetch | None, pause: float) -> None:
        """The scheduling attempt deferred these requests and began the fetch `begun`, if any.
        `pause` is how many seconds an idle engine may sleep."""
        self._idle = False
        self._deferred, self._begun, self._pause = deferred, begun, pause

    def nothing_runs(self, requests: Set[str], loading: Set[str], copying: bool) -> bool:
        """Block briefly if every one of the unfinished `requests` is itself waiting. `loading` are
        those with a load under way; the workers are `copying` if they load or store anything.

        Returns whether the workers may block for their loads instead: then this step must go on,
        because it may be the one that hands the loads over.
        """
        if self._arrivals is None or not requests - loading <= self._deferred:
            return False
        if copying:
            return bool(loading)
        self._idle = True
        if self._begun is not None:  # leave Python's lock to the thread that runs it
            self._arrivals.wait(self._begun.ended.wait, _MAX_WAIT)
        elif self._pause:
            self._arrivals.wait(threading.Event().wait, self._pause)
        return False

    def before_lookups(self, requests: Set[str], pending: Fetch | None) -> None:
        """Wait for the fetch that the first request of the queue needs. If it arrives, the request
        is scheduled one step earlier."""
        idle, self._idle = self._idle, False  # a request behind it may find the engine busy
        if idle and pending and self._arrivals is not None and requests <= self._deferred:
            self._arrivals.wait(pending.ended.wait, _MAX_WAIT)
