"""Answers lookups for chunks that the pool lacks: fetch them, wait for a peer, or compute.

What `lookup` answers a request, one scheduling attempt ("pass") after the other:

    first pass     RETRY for each chunk that the tier holds, then MISS
    end_pass       begins one fetch per chosen donor for the chunks that got a RETRY
    further passes RETRY while the fetches are pending and the request has time left
    then           HIT for the chunks that arrived; another fetch if a peer holds more, or another
                   donor has what did not arrive; else MISS

Before a long MISS, the answer is RETRY until the tracker says whether a peer is computing the
prefix, and then for as long as it pays to wait for that peer (`Wait`).

Belongs to the scheduler thread. Every method returns at once, except that an idle engine waits a
few milliseconds (`IdleWait`).
"""

from collections.abc import Callable, Iterable

from vllm.v1.kv_offload.base import LookupResult

from xinference_xavier.engine.costs import CostModel
from xinference_xavier.engine.donors import DonorSelection, FetchPlan
from xinference_xavier.engine.request import Fetches, Phase, Request
from xinference_xavier.engine.waiting import MIN_PREFILL_SECONDS, Arrivals, IdleWait, Wait
from xinference_xavier.engine.workload import Steps
from xinference_xavier.peers import DISK_BIT
from xinference_xavier.pool.pool import Pool, Reservation
from xinference_xavier.pool.tier import Claim, Fetch
from xinference_xavier.protocol.load import mark_of
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.stats.schema import WaitCounts

Reserve = Callable[[Iterable[bytes], list[bytes]], Reservation]
"""Reserves rows for keys; the second argument is the whole prefix that they belong to."""

# An enum's members take longer to look up than all else that a MISS asks.
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
_TRANSIT = 0.25
"""Seconds that a request may take longer to the replica that prefills it than to this one."""


class TierLookup:
    def __init__(
        self,
        pool: Pool,
        tier: PeerTier,
        fetches: Fetches,
        *,
        selection: DonorSelection,
        cost_model: CostModel,
        steps: Steps,
        reserve: Reserve,
        step_tokens: int,
        fetch_timeout: float,
        mark_key: str,
        arrivals: Arrivals | None,
        clock: Callable[[], float],
    ) -> None:
        """`step_tokens` are computed in one step at most. `fetch_timeout` bounds, in seconds, how
        long a request waits for all of its fetches. Routers sign their marks with `mark_key`."""
        self._pool = pool
        self._tier = tier
        self._selection = selection
        self._cost_model = cost_model
        self._steps = steps
        self._reserve = reserve
        self._fetch_timeout = fetch_timeout
        self._clock = clock
        self.fetches = fetches
        self.idle_wait = IdleWait(arrivals)
        self.wait_counts = WaitCounts()
        self._mark_key = mark_key
        self.longest_scheduling_wait = 0.0  # seconds that a request waited because of us
        self._step_tokens = step_tokens
        self._plans: dict[Request, FetchPlan | None] = {}  # made in this pass
        # Requests deferred in this pass, by group, with the seconds that the engine may sleep.
        self._deferred: dict[tuple[str, bytes], float] = {}

    # -- called by the manager ----------------------------------------------------------------

    def lookup(self, key: bytes, request: Request) -> LookupResult:
        """Answer for a key without a READY row."""
        if request.phase is Phase.FETCHING:
            if request.pending and self._has_time(request):
                # One RETRY per group defers the request; MISS for the rest ends the scan early.
                if key not in request.retry_keys:
                    return MISS
                self._deferred[request.req_id, key[GROUP]] = 0.0
                return RETRY
            self._conclude(request)
            if self._pool.lookup(key) is not None:  # it arrived after the manager looked
                return HIT
        if request.phase is Phase.SETTLED:
            return MISS
        if not (self._has_time(request) or self._is_waiting(request)):
            return MISS
        plan = self._plan(key, request)
        if plan is not None and not plan.is_probe:
            return RETRY if key in request.retry_keys else MISS
        if self._waits_for_peer(key, request):
            return RETRY
        if request.claim_asked and request.wait is None and plan is None:
            request.computes()
        return MISS

    def wait_for_adapter(self, key: bytes, request: Request) -> LookupResult | None:
        """The answer while nobody has looked at the files of the request's adapter; None then."""
        look = request.adapter
        if look is None or look.too_late or look.ended.is_set():
            if request.digest is None:
                request.see_adapter()
            return None
        group = (request.req_id, key[GROUP])
        if group in self._deferred:
            return MISS
        if self._clock() >= look.deadline:
            look.too_late = True
            return None
        self._deferred[group] = 0.0
        return RETRY

    def end_pass(self) -> bool | None:
        """The scheduler has made all lookups of this step. Returns whether a fetch began; None if
        there was nothing to do."""
        if not (self._plans or self._deferred or self.fetches):
            self.idle_wait.pass_ended(frozenset(), None, 0.0)
            return None
        begun: list[Fetch] = []
        plans, self._plans = self._plans, {}
        waiting, self._deferred = self._deferred, {}
        deferred = {req_id for req_id, _ in waiting}
        for request, plan in plans.items():
            if plan is not None:
                begun += self._begin_fetches(request, plan)
                deferred |= {request.req_id} if request.fetches else set()
        if self.fetches:
            self.fetches.settle(self._clock())
        pause = min(waiting.values(), default=0.0)
        self.idle_wait.pass_ended(deferred, begun[-1] if begun else None, pause)
        return bool(begun)

    def scheduled(self, request: Request) -> None:
        """The request was scheduled, so it stops waiting."""
        self._conclude(request)
        if request.wait is not None:
            request.wait.count(self.wait_counts)
        self.fetches.stop_waiting(request.req_id)

    def finished(self, request: Request) -> None:
        self.fetches.stop_waiting(request.req_id)
        self._plans.pop(request, None)
        if request.wait is not None:
            request.wait.count(self.wait_counts)
            if not request.wait.claim.held_by_peer:
                self._tier.release_claim(request.wait.claim)

    def reset(self, requests: Iterable[Request]) -> None:
        """Void all chunks. Requests that are waiting for some will compute instead."""
        for request in requests:
            request.reset()
        self._plans.clear()
        self.fetches.reset()
        self._tier.reset()

    # -- fetching -----------------------------------------------------------------------------

    def _conclude(self, request: Request) -> None:
        """The request stops waiting for its fetches."""
        if request.fetches:
            request.conclude()
            waited = self._steps.idle_time(self._clock()) - request.pending_since
            self.longest_scheduling_wait = max(self.longest_scheduling_wait, waited)

    def _has_time(self, request: Request) -> bool:
        return request.deadline is None or self._clock() < request.deadline

    def _plan(self, key: bytes, request: Request) -> FetchPlan | None:
        """The request's plan in this pass, made when a chunk turns up that can be fetched."""
        if request in self._plans:
            return self._plans[request]
        is_held = self._tier.ready and self._tier.holders(key)
        if not is_held and self.fetches.bringing(key) is None:
            return None
        now = self._clock()
        deadline = request.deadline
        if deadline is None or now >= deadline:
            deadline = now + self._fetch_timeout
        plan = self._selection.plan(request, deadline, now)
        if plan is not None and not plan.is_probe:
            request.retry_keys = request.first_of_each_group(plan.keys)
            if deadline != request.deadline:
                request.deadline = deadline
                request.pending_since = self._steps.idle_time(now)
        self._plans[request] = plan
        request.looks_again()
        return plan

    def _begin_fetches(self, request: Request, plan: FetchPlan) -> list[Fetch]:
        """Make the request wait for fetches of the plan's chunks.

        Returns those that are new, as another request may have begun them already.
        """
        begun: list[Fetch] = []
        fetches = self.fetches.bringing_run(plan.keys)
        if not fetches:
            if not plan.donors:  # the others' fetches failed meanwhile; the next pass plans anew
                return []
            fetches = begun = self._new_fetches(request, plan)
        if plan.is_probe:
            return []
        if not fetches:
            request.settle()
            return []
        request.waits_for(fetches)
        for fetch in fetches:
            self.fetches.wait(request.req_id, fetch)
        return begun

    def _new_fetches(self, request: Request, plan: FetchPlan) -> list[Fetch]:
        now = self._clock()
        latest = now + self._fetch_timeout if request.deadline is None else request.deadline
        rows = self._reserve(plan.keys, request.row_keys()).rows
        parts = min(len(plan.donors), len(rows))
        fetches = []
        handed_over = 0
        try:
            for part, donor in enumerate(plan.donors[:parts]):
                share = rows[handed_over : len(rows) * (part + 1) // parts]
                for row in share:
                    row.origin = row.replicated_from = donor.name
                deadline = min(latest, now + donor.patience(len(share), now))
                handed_over += len(share)
                fetch = self._tier.submit_load(donor.name, share, deadline)
                if fetch is not None:
                    self.fetches.add(fetch, plan.is_probe)
                    self._cost_model.begun(fetch, donor, plan.prefill_seconds, self._clock())
                    fetches.append(fetch)
        finally:
            self._pool.abort(*rows[handed_over:])
        self._cost_model.decisions.fetched += bool(fetches) and not plan.is_probe
        return fetches

    # -- waiting for a peer's prefill ---------------------------------------------------------

    def _waits_for_peer(self, key: bytes, request: Request) -> bool:
        """True once per pass and group: one RETRY defers the request."""
        if not request.claim_asked:
            request.claim_asked = True
            request.wait = self._ask(key, request)
        if request.wait is None:
            return False
        group = (request.req_id, key[GROUP])
        if group in self._deferred or not self._is_waiting(request):
            return False
        if not self._selection.may_become_worth_fetching(key, request, self._clock()):
            return False
        self._deferred[group] = request.wait.pause
        request.deadline = None  # it bounds only fetches
        return True

    def _is_waiting(self, request: Request) -> bool:
        wait, ready = request.wait, self._tier.ready
        if wait is None or not ready or request.failed:
            return False
        if wait.peer and not self._tier.can_load_from(wait.peer):
            return False
        return wait.goes_on(self._is_computed, self._clock())

    def _ask(self, key: bytes, request: Request) -> Wait | None:
        """Ask whether a peer is computing the chunks from the first missing one on, if that takes
        long enough. If the router has said so, there is nothing to ask."""
        group = request.layout.group(key)
        keys = request.groups().get(key[GROUP], [])
        if key not in keys:  # of a part of a chunk
            return None
        # vLLM looks windows up from the end.
        place = (
            keys.index(key) if group.window is None else request.prefix_tokens // group.chunk_tokens
        )
        rest = keys[place:]
        if not self._tier.ready or self._is_at_peer(rest[0]):  # held but not worth fetching
            return None
        size = group.chunk_tokens
        start = place * size

        step = -(-self._step_tokens // size)
        if (elsewhere := mark_of(request.req_id, self._mark_key)) is not None:
            share = elsewhere.seconds / len(rest)
            claim = Claim(rest, elsewhere.seconds, held_by_peer=len(rest))
            wait = Wait(claim, lambda chunks: chunks * share, step, self._clock())
            wait.peer, wait.head_start = elsewhere.replica, elsewhere.queue + _TRANSIT
            return wait

        def local_seconds(chunks: int) -> float:
            return self._selection.prefill_seconds(start, start + chunks * size) or 0.0

        seconds = local_seconds(len(rest))
        if seconds < MIN_PREFILL_SECONDS or len(rest) * size < self._selection.min_tokens:
            return None
        asked = self._tier.claim(rest, seconds)
        return None if asked is None else Wait(asked, local_seconds, step, self._clock())

    def _is_computed(self, key: bytes) -> bool:
        return self._is_at_peer(key) or self._pool.lookup(key) is not None

    def _is_at_peer(self, key: bytes) -> bool:
        """Whether a peer holds the chunk. What is on the host's disk does not say what peers are
        computing."""
        return bool(self._tier.holders(key) & ~DISK_BIT)
