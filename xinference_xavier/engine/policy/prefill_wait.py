"""Whether a request waits for a peer that computes its prefix, instead of computing it as well.

Belongs to the scheduler thread; `counts` may be read by any. Times are monotonic seconds.

Whoever misses a prefix that takes `WORTH_ASKING` or longer to compute asks the tracker who is
computing it. The first to ask does; the others wait, and fetch the chunks as they are finished. A
request waits for as long as the peer keeps up with what the engine would do by itself: behind it by
at most two of its steps, since a peer tells of a step's chunks only after the next one, and a
quarter of the whole. Whatever ends the wait, what has arrived by then is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from xinference_xavier.replica.tracker_client import Claim
from xinference_xavier.stats.schema import WaitCounts

WORTH_ASKING = 1.0
"""Seconds of computing: some two hundred round trips to the tracker."""
_LOOKS = 50  # in the time of a step
_MAX_PAUSE = 0.05
_ANSWER_WITHIN = 1.0  # the replica gives up before; this is for one that hangs
_STEPS_BEHIND = 2
_SLACK = 0.25


class Wait:
    """One request's wait, from `now` on. `local_seconds(n)` is how long its own engine takes for
    the first n chunks; it computes `step` of them at a time."""

    def __init__(
        self, claim: Claim, local_seconds: Callable[[int], float], step: int, now: float
    ) -> None:
        self.claim = claim
        self._began = now
        self._local_seconds = local_seconds
        self._step = step
        self.pause = min(local_seconds(step) / _LOOKS, _MAX_PAUSE)
        """Seconds between two looks of an engine that has nothing else to do. vLLM's own one
        millisecond costs processor time that the peer may need."""
        self._computed = 0  # of the first chunks
        self._gave_up = False
        self._is_counted = False

    def goes_on(self, is_computed: Callable[[bytes], bool], now: float) -> bool:
        """Whether the request waits on."""
        held_by_peer = self.claim.held_by_peer
        if held_by_peer is None:
            return now < self._began + _ANSWER_WITHIN
        rest = itertools.islice(self.claim.keys, self._computed, held_by_peer)
        self._computed += sum(1 for _ in itertools.takewhile(is_computed, rest))
        if self._computed >= held_by_peer:
            return False
        told = min(self._computed + _STEPS_BEHIND * self._step, len(self.claim.keys))
        due = self._began + self._local_seconds(told) + _SLACK * self.claim.seconds
        self._gave_up = now >= due
        return not self._gave_up

    def count(self, counts: WaitCounts, now: float) -> None:
        """The request is decided on, or over; does nothing but the first time."""
        if self._is_counted:
            return
        self._is_counted = True
        if not self.claim.held_by_peer:
            counts.claimed += 1
            return
        counts.waited += 1
        counts.given_up += self._gave_up
        counts.seconds += now - self._began
