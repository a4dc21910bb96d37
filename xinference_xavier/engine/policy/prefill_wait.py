"""Whether a request waits for a peer that computes its prefix.

Belongs to the scheduler thread; any thread may read the counts. Times are monotonic seconds.

The peer has to keep up with what the request's own engine would have computed. It may be two steps
behind, because it publishes a step's chunks only after the next step, and a quarter of the whole.
However the wait ends, the chunks that have arrived are used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from xinference_xavier.stats.schema import WaitCounts
from xinference_xavier.tiers.base import Claim

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
        """That computes them, if the router has said so."""
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

    def count(self, counts: WaitCounts, now: float) -> None:
        """The request is scheduled or over; further calls do nothing."""
        if self._is_counted:
            return
        self._is_counted = True
        if not self.claim.held_by_peer:
            counts.claimed += 1
            return
        counts.waited += 1
        counts.given_up += self._gave_up
        counts.seconds += now - self._began
