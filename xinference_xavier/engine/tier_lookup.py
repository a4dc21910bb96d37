"""Answers lookups for chunks that the pool lacks: fetch them, wait for a peer, or compute.

What `lookup` answers a request, one scheduling attempt ("pass") after the other:

    first pass     RETRY for each chunk that the tier holds, then MISS
    end_pass       begins one fetch per chosen donor for the chunks that got a RETRY
    further passes RETRY while the fetches are pending and the request has time left
    then           HIT for the chunks that arrived; another fetch if a peer holds more, or another
                   donor has what did not arrive; else MISS

Before a long MISS, the answer is RETRY until the tracker says whether a peer is computing the
prefix, and then for as long as it pays to wait for that peer (`PeerPrefills`).

Belongs to the scheduler thread. Every method returns at once.
"""

from collections.abc import Callable, Iterable

from vllm.v1.kv_offload.base import LookupResult

from xinference_xavier.engine.donors import DonorSelection
from xinference_xavier.engine.fetches import Fetches, FetchPlan
from xinference_xavier.engine.idle import NOTHING, PassEnd
from xinference_xavier.engine.request import Attempt, Phase, Request
from xinference_xavier.engine.waiting import PeerPrefills
from xinference_xavier.engine.workload import Steps
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.fetcher import Fetch

# An enum's members take longer to look up than all else that a MISS asks.
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


class TierLookup:
    def __init__(
        self,
        pool: Pool,
        fetches: Fetches,
        selection: DonorSelection,
        peer_prefills: PeerPrefills,
        steps: Steps,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._fetches = fetches
        self._selection = selection
        self._peer_prefills = peer_prefills
        self._steps = steps
        self._clock = clock
        self.longest_scheduling_wait = 0.0  # seconds that a request waited because of us
        self._attempts: list[Request] = []  # that have an attempt

    # -- called by the manager ----------------------------------------------------------------

    def lookup(self, key: bytes, request: Request) -> LookupResult:
        """Answer for a key without a READY row."""
        now = self._clock()
        if request.phase is Phase.FETCHING:
            if request.pending and request.has_time(now):
                # One RETRY per group defers the request; MISS for the rest ends the scan early.
                return self._defer(key, request) if key in request.retry_keys else MISS
            self._conclude(request)
            if self._pool.lookup(key) is not None:  # it arrived after the manager looked
                return HIT
        if request.phase is Phase.POOL_ONLY:
            return MISS
        if not (request.has_time(now) or self._peer_prefills.is_awaited_by(request)):
            return MISS
        plan = self._plan(key, request, now)
        if plan is not None and not plan.is_trial:
            return RETRY if key in request.retry_keys else MISS
        wait = self._peer_prefills.wait_of(request, key)
        if wait is None:
            if plan is None:
                request.mark_computing()
            return MISS
        if request.is_deferred(key) or not self._peer_prefills.pays(request, key):
            return MISS
        request.deadline = None  # it bounds only fetches
        return self._defer(key, request)

    def end_pass(self) -> PassEnd:
        """The scheduler has made all lookups of this step: begin the planned fetches."""
        if not (self._attempts or self._fetches):
            return NOTHING
        passed = [(request, request.attempt) for request in self._attempts]
        self._forget_attempts()
        begun: list[Fetch] = []
        deferred: set[str] = set()
        for request, attempt in passed:
            if attempt is None:  # the request has ended
                continue
            if attempt.plan is not None:
                begun += self._begin_fetches(request, attempt.plan)
            if attempt.deferred or request.fetches:
                deferred.add(request.req_id)
        self._fetches.release_ended()
        return PassEnd(deferred, begun[-1] if begun else None)

    def scheduled(self, request: Request) -> None:
        """The request was scheduled, so it stops waiting."""
        self._conclude(request)
        self._peer_prefills.scheduled(request)
        request.awaited.clear()

    def finished(self, request: Request) -> None:
        request.attempt = None
        self._peer_prefills.finished(request)

    def reset(self, requests: Iterable[Request]) -> None:
        """Void all chunks. Requests that are waiting for some will compute instead."""
        for request in requests:
            request.reset()
        self._forget_attempts()
        self._fetches.by_chunk.clear()

    # -- passes -------------------------------------------------------------------------------

    def _attempt(self, request: Request) -> Attempt:
        if request.attempt is None:
            request.attempt = Attempt()
            self._attempts.append(request)
        return request.attempt

    def _forget_attempts(self) -> None:
        for request in self._attempts:
            request.attempt = None
        self._attempts.clear()

    def _defer(self, key: bytes, request: Request) -> LookupResult:
        """vLLM looks the request up again in the next step."""
        self._attempt(request).deferred.add(key[GROUP])
        return RETRY

    # -- fetching -----------------------------------------------------------------------------

    def _conclude(self, request: Request) -> None:
        """The request stops waiting for its fetches."""
        if request.fetches:
            request.conclude()
            waited = self._steps.idle_time(self._clock()) - request.pending_since
            self.longest_scheduling_wait = max(self.longest_scheduling_wait, waited)

    def _plan(self, key: bytes, request: Request, now: float) -> FetchPlan | None:
        """The request's plan in this pass, made when a chunk turns up that can be fetched."""
        if request.attempt is not None and request.attempt.is_planned:
            return request.attempt.plan
        if not self._fetches.can_bring(key):
            return None
        deadline = request.deadline
        if deadline is None or now >= deadline:
            deadline = now + self._fetches.timeout
        plan = self._selection.plan(request, deadline, now)
        if plan is not None and not plan.is_trial:
            request.retry_keys = request.first_of_each_group(plan.keys)
            if deadline != request.deadline:
                request.deadline = deadline
                request.pending_since = self._steps.idle_time(now)
        attempt = self._attempt(request)
        attempt.is_planned, attempt.plan = True, plan
        request.resume_lookup()
        return plan

    def _begin_fetches(self, request: Request, plan: FetchPlan) -> list[Fetch]:
        """Make the request wait for fetches of the plan's chunks.

        Returns those that are new, as another request may have begun them already.
        """
        begun: list[Fetch] = []
        fetches = self._fetches.bringing_run(plan.keys)
        if not fetches:
            if not plan.donors:  # the others' fetches failed meanwhile; the next pass plans anew
                return []
            fetches = begun = self._fetches.begin(plan, request.row_keys(), request.deadline)
        if plan.is_trial:
            return []
        if not fetches:
            request.stop_fetching()
            return []
        request.wait_for(fetches)
        return begun
