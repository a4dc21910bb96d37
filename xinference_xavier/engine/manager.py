"""Decides, for vLLM's scheduler, which chunks are at hand, and brings in those that peers hold.

Threading: every method is called by the scheduler thread, works on dictionaries only and returns at
once, but for what an idle engine waits for; what takes longer is handed to the replica's background
thread. Only this thread evicts rows, and only in `on_schedule_end` and `prepare_store`: a HIT stays
one until the end of its scheduling step.

A request's way through `lookup`, one scheduling attempt ("pass") after the other:

    first pass      HITs from the pool, then RETRY for each chunk that a peer holds, MISS at the end
    on_schedule_end a fetch is begun for the chunks that got a RETRY, from one donor or several
    further passes  RETRY while it is under way and the request has time left
    then            HIT for what arrived, MISS for the rest; once more if all of it arrived

Before a long MISS, RETRY until the tracker has said whether a peer is computing it, and for as long
as waiting for that peer is expected to pay (`Wait`).
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from xinference_xavier.engine.compat import known_keys, load_source
from xinference_xavier.engine.metrics import HitReporter
from xinference_xavier.engine.policy.cost_model import CostModel
from xinference_xavier.engine.policy.donor_selection import DonorSelection
from xinference_xavier.engine.policy.prefill_rate import PrefillRate
from xinference_xavier.engine.policy.prefill_wait import WORTH_ASKING, Wait
from xinference_xavier.engine.request import GROUP, Fetches, Request
from xinference_xavier.engine.steps import Step, Steps
from xinference_xavier.pool.pool import Pool, Reservation, Row
from xinference_xavier.replica.explain import Chunker
from xinference_xavier.replica.fetcher import Fetch
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.replica.replica import Replica
from xinference_xavier.stats.schema import Hits, WaitCounts

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

_LOOK = 0.005  # seconds, at most, between two looks at a fetch while there is nothing else to do


class XavierManager(OffloadingManager):
    def __init__(
        self,
        pool: Pool,
        *,
        chunk_tokens: int,
        row_bytes: int,
        min_fetch_tokens: int,
        choose: bool,
        fetch_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`min_fetch_tokens` and `choose` are those of `DonorSelection`."""
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._fetch_timeout = fetch_timeout
        self._clock = clock
        self._replica: Replica
        self._peers: PeerTier
        self._requests: dict[str, Request] = {}
        self._gathered: dict[str, Request] = {}  # got a RETRY in this step, fetch to be begun
        self._storing: dict[bytes, Row] = {}
        self._loading: dict[str, list[Row]] = {}  # by request; pinned for a worker's load
        self._stale_stores: list[Row] = []  # of before the last reset: their jobs may still write
        self._stale_loads: list[Row] = []  # likewise, may still read
        self._hits = Hits()
        self._reporter = HitReporter(self._hits)
        self._finished_requests = 0
        self._longest_scheduling_wait = 0.0  # seconds from a first RETRY on that were lost to us
        self._steps = Steps()
        self.prefill_rate = PrefillRate()
        self._cost_model = CostModel(row_bytes=row_bytes)
        self._fetches = Fetches(pool, self._cost_model, fetch_timeout)
        self._donor_selection = DonorSelection(
            pool,
            self.prefill_rate,
            self._cost_model,
            chunk_tokens=chunk_tokens,
            min_fetch_tokens=min_fetch_tokens,
            choose=choose,
        )
        self.step_tokens = chunk_tokens  # that the engine computes at once, at most
        self._waits = WaitCounts()
        # Requests in this step, by group, and how many seconds nothing is lost by.
        self._deferred: dict[tuple[str, bytes], float] = {}
        self._pause = 0.0  # the least of them
        self._idle = False  # nothing was scheduled in the last step
        self._begun: Fetch | None = None  # in this step

    def attach(self, replica: Replica) -> None:
        """The replica that fetches and shares for this engine; before anything else."""
        self._replica = replica
        self._peers = replica.tier
        self._donor_selection.mirror = replica.mirror

    def explain_with(self, chunker: Chunker) -> None:
        """How the replica finds the chunks of a prompt that somebody asks about."""
        self._replica.chunker = chunker

    def stats(self) -> dict[str, Any]:
        """Called by the replica's background thread."""
        rate = self.prefill_rate.tokens_per_second
        reused = self._hits.local_pool + self._hits.remote
        return {
            "vllm": vllm.__version__,
            "hits": asdict(self._hits),
            "requests": self._finished_requests,
            "longest_scheduling_wait_s": self._longest_scheduling_wait,
            "prefill_tokens_per_s": rate,
            "seconds_saved": reused / rate if rate else 0.0,
            "cost_model": self._cost_model.report(),
            "waits": asdict(self._waits),
        }

    def trace(self, req_id: str, headers: Mapping[str, str]) -> None:
        """The request belongs to the trace that these headers name, and so does its fetch."""
        self._requests[req_id].trace_headers = headers

    # -- looking up ---------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._pool.sweep()  # between two steps
        self._requests[req_context.req_id] = Request(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._pool.lookup(key) is not None:
            return LookupResult.HIT
        request = self._requests[req_context.req_id]
        if request.fetches:
            self._look_at(request)
            if request.pending and self._has_time(request):
                # One RETRY per group defers the request; MISS for the rest ends the scan early.
                if key not in request.first:
                    return LookupResult.MISS
                self._deferred[req_context.req_id, key[GROUP]] = 0.0
                return LookupResult.RETRY
            self._conclude(request)
            if self._pool.lookup(key) is not None:  # since we looked first
                return LookupResult.HIT
        if request.given_up or not (self._has_time(request) or self._is_waiting(request)):
            return LookupResult.MISS
        if not self._is_elsewhere(key, request):
            waits = not request.wanted and self._waits_for_peer(key, request)
            return LookupResult.RETRY if waits else LookupResult.MISS
        request.wanted.append(key)
        self._gathered[req_context.req_id] = request
        return LookupResult.RETRY

    def _has_time(self, request: Request) -> bool:
        return request.deadline is None or self._clock() < request.deadline

    def _conclude(self, request: Request) -> None:
        if request.fetches:
            request.conclude()
            waited = self._steps.idle_time(self._clock()) - request.pending_since
            self._longest_scheduling_wait = max(self._longest_scheduling_wait, waited)

    def _is_elsewhere(self, key: bytes, request: Request) -> bool:
        if self._fetches.bringing(key) is not None:
            return True
        if not self._peers.can_fetch:
            return False
        holders = self._peers.mirror.holders(key)
        if not holders or self._pool.holds(key):
            return False
        if request.wanted:
            return True
        return self._donor_selection.is_worth_fetching(key, holders, request, self._clock())

    # -- waiting for peers that compute -------------------------------------------------------

    def _waits_for_peer(self, key: bytes, request: Request) -> bool:
        """True once in a step for each group: that defers the request."""
        if not request.asked:
            request.asked = True
            request.wait = self._ask(key, request)
        if request.wait is None:
            return False
        group = (request.context.req_id, key[GROUP])
        if group in self._deferred or not self._is_waiting(request):
            return False
        if not self._donor_selection.may_become_worth_fetching(key, request, self._clock()):
            return False
        self._deferred[group] = request.wait.pause
        request.deadline = None  # is for what a peer holds
        return True

    def _is_waiting(self, request: Request) -> bool:
        wait, can_fetch = request.wait, self._peers.can_fetch
        return wait is not None and can_fetch and wait.goes_on(self._is_computed, self._clock())

    def _ask(self, key: bytes, request: Request) -> Wait | None:
        """Who computes what nobody has from `key` on, if that takes so long that it is worth it."""
        mirror = self._peers.mirror
        if not (self._peers.can_fetch and mirror.enabled and mirror.peers):
            return None
        if mirror.holders(key):  # and it was not worth fetching
            return None
        group = request.group_of(key)
        rest = list(itertools.dropwhile(lambda other: other != key, group))
        place = len(group) - len(rest)

        def local_seconds(chunks: int) -> float:
            return self._donor_selection.computing(place, chunks) or 0.0

        seconds = local_seconds(len(rest))
        if seconds < WORTH_ASKING or len(rest) < self._donor_selection.min_chunks:
            return None
        claim = self._peers.claim(rest, seconds)
        return Wait(claim, local_seconds, -(-self.step_tokens // self._chunk_tokens), self._clock())

    def _is_computed(self, key: bytes) -> bool:
        return bool(self._peers.mirror.holders(key)) or self._pool.lookup(key) is not None

    # -- fetching -----------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._idle, self._begun = False, None
        for req_id, request in self._gathered.items():
            self._begin_fetch(req_id, request)
            request.wanted = []
        self._gathered.clear()
        if self._fetches:
            self._fetches.settle(self._clock())
        self._pause = min(self._deferred.values(), default=0.0)
        self._deferred.clear()
        self._pool.sweep()

    # -- steps --------------------------------------------------------------------------------

    def step_begins(self, tokens: int, prompt_tokens: int, depth: float) -> None:
        """A step was scheduled: see `Step`."""
        self._steps.begin(Step(self._clock(), tokens, prompt_tokens, depth))
        if not self._steps.computing:
            self._idle_wait()

    def step_ends(self) -> None:
        """vLLM has the output of the oldest step that it began."""
        ended = self._steps.end(self._clock())
        if ended is not None:
            step, seconds = ended
            self.prefill_rate.add(step.prompt_tokens, seconds, step.depth)

    def _idle_wait(self) -> None:
        """Nothing is computed. Who asks at once whether anything has changed takes processor time
        and Python's lock from those who work on it, on this host or in this process."""
        if self._loading or self._storing:  # the worker may not have been told yet
            return
        self._idle = True
        if self._begun is not None:  # its thread has to get Python's lock first
            self._begun.ended.wait(_LOOK)
        elif not any(self._fetches.pending()):
            time.sleep(self._pause)

    def _look_at(self, request: Request) -> None:
        """An idle engine waits for a fetch, so that its request is scheduled as soon as it can be:
        its next look is a millisecond of vLLM's and all that a step has around it away."""
        fetch = request.pending if self._idle else None
        if fetch is not None:
            self._idle = False  # once in a step
            fetch.ended.wait(_LOOK)

    def _begin_fetch(self, req_id: str, request: Request) -> None:
        now = self._clock()
        if request.deadline is None or now >= request.deadline:
            request.deadline = now + self._fetch_timeout
            request.pending_since = self._steps.idle_time(now)
        fetches = self._fetches.bringing_run(request.wanted) or self._new_fetches(request, now)
        if not fetches:
            request.given_up = True
            return
        request.waits_for(fetches)
        for fetch in fetches:
            self._fetches.wait(req_id, fetch)

    def _new_fetches(self, request: Request, now: float) -> list[Fetch]:
        assert request.deadline is not None
        plan = self._donor_selection.plan(request, request.deadline, self._fetches.by_donor(), now)
        if plan is None:
            return []
        rows = self._reserve(plan.keys, known_keys(request.context) or request.wanted).rows
        parts = min(len(plan.donors), len(rows))
        fetches = []
        for part, donor in enumerate(plan.donors[:parts]):
            its_rows = rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]
            for row in its_rows:
                row.replicated_from = donor
            fetch = self._peers.fetch(donor, its_rows, request.deadline, request.trace_headers)
            if fetch is not None:
                self._fetches.add(fetch)
                self._cost_model.begun(fetch, plan.computing, now)
                fetches.append(fetch)
                self._begun = fetch
        self._cost_model.choices.fetched += bool(fetches)
        return fetches

    def has_pending_work(self) -> bool:
        return bool(self._fetches)

    # -- loading ------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        rows = self._pool.pin(keys)
        # Each key was a HIT in this step and nothing was evicted since; loading anything else
        # instead would be a wrong token, which is worse than a dead engine.
        assert len(rows) == len(keys), "a chunk was lost between its lookup and its load"
        self._loading[req_context.req_id] = rows
        return CPULoadStoreSpec([row.slot for row in rows])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._free_stale()
        self._pool.unpin(self._loading.pop(req_context.req_id))

    # -- storing ------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        rows, evicted = self._reserve(keys, known_keys(req_context) or list(keys))
        self._storing.update((row.key, row) for row in rows)
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(row.key) for row in rows],
            store_spec=CPULoadStoreSpec([row.slot for row in rows]),
            evicted_keys=[OffloadKey(key) for key in evicted],
        )

    def _reserve(self, keys: Iterable[bytes], prefix: Sequence[bytes]) -> Reservation:
        """Rows for `keys`, at the cost of anything but the prefix that they belong to."""
        self._pool.touch(reversed(prefix))
        reservation = self._pool.reserve(keys, frozenset(prefix), self._is_spare)
        self._peers.evicted(reservation.evicted)
        return reservation

    def _is_spare(self, row: Row) -> bool:
        """Whether the peer that it was copied from has it still, and so can give it again."""
        return (
            row.replicated_from is not None
            and row.replicated_from in self._peers.mirror.holders(row.key)
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._free_stale()
        rows = [self._storing.pop(key) for key in keys]
        if success:
            self._peers.stored([row for row in rows if self._pool.commit(row)])
        else:
            for row in rows:
                self._pool.abort(row)

    # -- the rest -----------------------------------------------------------------------------

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Called by vLLM up to 0.30 only."""
        self._pool.touch(reversed(list(keys)))

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._finished_requests += 1
        self._fetches.stop_waiting(req_context.req_id)
        self._gathered.pop(req_context.req_id, None)
        # vLLM does not say which chunks its own prefix cache served, and those are in use as well.
        # From the tail on, so that a prefix is evicted from its end.
        self._pool.touch(reversed(known_keys(req_context)))
        wait = self._requests.pop(req_context.req_id).wait
        if wait is not None:
            wait.count(self._waits, self._clock())
            if not wait.claim.held_by_peer:
                self._peers.release_claim(wait.claim)

    def reset_cache(self) -> None:
        """vLLM has forgotten all blocks and will not report what is under way now."""
        self._stale_stores += self._storing.values()
        self._storing.clear()
        for rows in self._loading.values():
            self._stale_loads += rows
        self._loading.clear()
        for request in self._requests.values():
            waited = bool(request.fetches) or request.wait is not None
            request.given_up = request.given_up or waited
            request.fetches = []
            request.wanted = []
        self._gathered.clear()
        self._fetches.reset()
        self._peers.reset()

    def _free_stale(self) -> None:
        """A job that began after the last reset has ended, so those from before have too."""
        for row in self._stale_stores:
            self._pool.abort(row)
        self._pool.unpin(self._stale_loads)
        self._stale_stores, self._stale_loads = [], []

    def on_reset_flushed(self) -> None:
        """Called by vLLM from 0.33 on: no job from before the last reset is under way."""
        self._free_stale()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._reporter.delta()

    def count_prompt(self, req_id: str, prompt: int, own_prefix: int, loaded: int) -> None:
        """A request was scheduled: its tokens, those in vLLM's own cache, those we bring."""
        request = self._requests[req_id]
        self._conclude(request)
        if request.wait is not None:
            request.wait.count(self._waits, self._clock())
        fetched = sum(row.key in request.fetched for row in self._loading.get(req_id, ()))
        peers = min(loaded, fetched * self._chunk_tokens)
        self._hits.prefix_cache += own_prefix
        self._hits.local_pool += loaded - peers
        self._hits.remote += peers
        self._hits.computed += max(0, prompt - own_prefix - loaded)
        self._fetches.stop_waiting(req_id)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> "CacheHitSource":
        """Called by vLLM from 0.32 on, after `count_prompt`."""
        return load_source(key in self._requests[req_context.req_id].fetched)

    def shutdown(self) -> None:
        self._replica.stop()
