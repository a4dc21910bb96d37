"""Requests that wait for a peer which computes their prefix.

A `Wait` goes on as long as the peer keeps up with what the request's own engine would have
computed. The peer may be two steps behind, because it publishes a step's chunks only after the next
step, and a quarter of the whole. However the wait ends, the chunks that have arrived are used.

Belongs to the scheduler thread. Any thread may read the counts. Times are monotonic seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from xinference_xavier.engine.donors import DonorSelection
from xinference_xavier.engine.facts import SchedulerFacts
from xinference_xavier.engine.request import Request
from xinference_xavier.peers import DISK_BIT
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.load import mark_of
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.replica.tracker_client import Claim
from xinference_xavier.stats.schema import WaitCounts

MIN_PREFILL_SECONDS = 1.0
"""About two hundred round trips to the tracker."""
_ANSWER_TIMEOUT = 1.0  # only for a loop that hangs: the replica gives up earlier
_TRANSIT = 0.25
"""Seconds that a request may take longer to the replica that prefills it than to this one."""
_STEPS_BEHIND = 2
_SLACK = 0.25


class Wait:
    """One request's wait, which begins `now`.

    `local_seconds(n)` is how long the request's own engine takes for the first n chunks. It
    computes `step` chunks at a time. If a router has named the `peer` that computes them, it may
    begin `head_start` seconds later than this engine would.
    """

    def __init__(
        self,
        claim: Claim,
        local_seconds: Callable[[int], float],
        step: int,
        now: float,
        peer: str = "",
        head_start: float = 0.0,
    ) -> None:
        self.claim = claim
        self.peer = peer
        self._head_start = head_start
        self._began = now
        self._local_seconds = local_seconds
        self._step = step
        self._computed = 0  # leading chunks
        self._gave_up = False
        self._is_counted = False

    @property
    def leaves_it_to_peer(self) -> bool:
        """True if the peer was told to compute, and this engine expects that it does."""
        return bool(self.peer) and not (self._gave_up or self._is_counted)

    def peer_keeps_up(self, is_computed: Callable[[bytes], bool], now: float) -> bool:
        """True if waiting still pays. The tracker's answer has a second to arrive."""
        held_by_peer = self.claim.held_by_peer
        if held_by_peer is None:
            return now < self._began + _ANSWER_TIMEOUT
        rest = itertools.islice(self.claim.keys, self._computed, held_by_peer)
        self._computed += sum(1 for _ in itertools.takewhile(is_computed, rest))
        if self._computed >= held_by_peer:
            return False
        allowed = min(self._computed + _STEPS_BEHIND * self._step, len(self.claim.keys))
        own = self._head_start + self._local_seconds(allowed)
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


class PeerPrefills:
    """Decides which requests wait for a prefill at a peer."""

    def __init__(
        self,
        facts: SchedulerFacts,
        pool: Pool,
        tier: PeerTier,
        selection: DonorSelection,
        clock: Callable[[], float],
    ) -> None:
        self.counts = WaitCounts()
        self._facts = facts
        self._pool = pool
        self._tier = tier
        self._selection = selection
        self._clock = clock

    def is_awaited_by(self, request: Request) -> bool:
        """True if the request waits for a peer that keeps up."""
        wait = request.wait
        if wait is None or not self._tier.ready or request.failed:
            return False
        if wait.peer and not self._tier.can_load_from(wait.peer):
            return False
        return wait.peer_keeps_up(self._is_computed, self._clock())

    def wait_of(self, request: Request, key: bytes) -> Wait | None:
        """The request's wait, even if it is over. It begins at the first missing chunk, `key`."""
        if not request.claim_asked:
            request.claim_asked = True
            request.wait = self._begin(key, request)
        return request.wait

    def pays(self, request: Request, key: bytes) -> bool:
        """True if the request should wait for the missing chunk `key`."""
        return self.is_awaited_by(request) and self._selection.may_become_worth_fetching(
            key, request, self._clock()
        )

    def scheduled(self, request: Request) -> None:
        if request.wait is not None:
            request.wait.count(self.counts)

    def finished(self, request: Request) -> None:
        self.scheduled(request)
        if request.wait is not None and not request.wait.claim.held_by_peer:
            self._tier.release_claim(request.wait.claim)

    def _begin(self, key: bytes, request: Request) -> Wait | None:
        """Wait for the chunks from the first missing one on, if a peer computes them, perhaps."""
        group = request.layout.group(key)
        keys = request.groups().get(key[GROUP], [])
        if key not in keys:  # of a part of a chunk
            return None
        size = group.chunk_tokens
        # vLLM looks windows up from the end.
        place = keys.index(key) if group.window is None else request.prefix_tokens // size
        missing = keys[place:]
        if not self._tier.ready or self._is_at_peer(missing[0]):  # held but not worth fetching
            return None
        step = -(-self._facts.step_tokens // size)
        return self._marked(request.req_id, missing, step) or self._claimed(
            missing, place * size, size, step
        )

    def _marked(self, req_id: str, missing: list[bytes], step: int) -> Wait | None:
        """If a router has sent the prompt to a peer, too, there is nothing to ask."""
        mark = mark_of(req_id, self._facts.serving.mark_key)
        if mark is None:
            return None
        share = mark.seconds / len(missing)
        claim = Claim(missing, mark.seconds, held_by_peer=len(missing))
        return Wait(
            claim,
            lambda chunks: chunks * share,
            step,
            self._clock(),
            peer=mark.replica,
            head_start=mark.queue + _TRANSIT,
        )

    def _claimed(self, missing: list[bytes], start: int, size: int, step: int) -> Wait | None:
        """Ask whether a peer computes the chunks from the token `start` on, if that takes long."""

        def local_seconds(chunks: int) -> float:
            return self._selection.prefill_seconds(start, start + chunks * size) or 0.0

        seconds = local_seconds(len(missing))
        if seconds < MIN_PREFILL_SECONDS or len(missing) * size < self._selection.min_tokens:
            return None
        claim = self._tier.claim(missing, seconds)
        return None if claim is None else Wait(claim, local_seconds, step, self._clock())

    def _is_computed(self, key: bytes) -> bool:
        return self._is_at_peer(key) or self._pool.lookup(key) is not None

    def _is_at_peer(self, key: bytes) -> bool:
        """True if a peer holds the chunk. What is on the host's disk does not say what peers are
        computing."""
        return bool(self._tier.holders(key) & ~DISK_BIT)
