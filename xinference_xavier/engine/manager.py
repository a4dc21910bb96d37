"""vLLM's offloading manager over the pool and a tier.

Threading: the scheduler thread calls every method except `stats`. A method works on dictionaries
and returns at once; slow work goes to the tier's own threads. Only the scheduler thread evicts
rows, and only in `on_schedule_end` and `prepare_store`, so a HIT stays one for its scheduling step.

The manager answers for chunks in the pool, `TierLookup` for all others.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.lora.request import LoRARequest
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

from xinference_xavier import vllm_versions
from xinference_xavier.engine.adapters import Adapters, Unconfirmed
from xinference_xavier.engine.audits import CanAudit
from xinference_xavier.engine.compat import key_positions, load_source
from xinference_xavier.engine.costs import CostModel, PrefillRate, StepCost
from xinference_xavier.engine.donors import DonorSelection
from xinference_xavier.engine.evictor import Evictor
from xinference_xavier.engine.facts import SchedulerFacts
from xinference_xavier.engine.fetches import Fetches
from xinference_xavier.engine.first_tokens import CommonBeginnings, FirstTokenTimes, stats_of
from xinference_xavier.engine.guard import SchedulerErrors, guarded, nothing
from xinference_xavier.engine.idle import NOTHING, IdleWait
from xinference_xavier.engine.probes import Probes
from xinference_xavier.engine.request import Jobs, Phase, Request
from xinference_xavier.engine.tier_lookup import HIT, MISS, TierLookup
from xinference_xavier.engine.waiting import PeerPrefills
from xinference_xavier.engine.workload import Steps, Workload
from xinference_xavier.peers import DISK
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.tracker import GROUP
from xinference_xavier.replica.hot_chunks import MAX_REQUESTS
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.stats.report import add
from xinference_xavier.stats.schema import Hits

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

logger = logging.getLogger(__name__)


def _nothing_to_store() -> PrepareStoreOutput:
    return PrepareStoreOutput([], CPULoadStoreSpec([]), [])


class XavierManager(OffloadingManager):
    def __init__(
        self,
        facts: SchedulerFacts,
        pool: Pool,
        tier: PeerTier,
        probes: Callable[[CanAudit], Probes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probes` makes them, given when they may audit."""
        self.facts = facts
        self.pool, self._held = pool, pool.held
        self._tier, self._holders = tier, tier.holders
        self.errors = SchedulerErrors(logger)
        self.requests: dict[str, Request] = {}  # unfinished ones by id
        self.adapters = Adapters(clock)
        self._unconfirmed = deque[Unconfirmed]()
        self._clock = clock
        self._prefix_cache_is_stale = False  # vLLM's own: it may have blocks of other weights
        self._all_share = facts.shares  # all requests, so far
        self._finished_requests = 0
        self._jobs = Jobs(pool)
        self._hits = Hits()
        self._unreported = Hits()  # of them, to vLLM
        self.probes = probes(self._can_audit)
        self.first_tokens = FirstTokenTimes()
        self._beginnings = CommonBeginnings(self._holders)
        self.pass_end_is_due = False  # in the next step, even if vLLM asks for nothing
        self.finished: deque[Sequence[bytes]] = deque(maxlen=MAX_REQUESTS)  # chunks of requests
        self._evictor = Evictor(pool, tier)
        self._idle_wait = IdleWait(facts.alone)
        self.prefill_rate = PrefillRate()
        self.steps = Steps(self.requests, self.prefill_rate, StepCost())
        self.cost_model = CostModel(tier.peers, row_bytes=facts.row_bytes)
        self.fetches = Fetches(
            pool,
            tier,
            self.requests,
            self._evictor,
            self.cost_model,
            facts.fetch_timeout,
            clock,
        )
        self._fetch_of_chunk = self.fetches.by_chunk
        self.selection = DonorSelection(
            pool,
            tier,
            self.fetches,
            self.prefill_rate,
            self.cost_model,
            min_fetch_tokens=facts.min_fetch_tokens,
            adaptive=facts.adaptive,
        )
        self.peer_prefills = PeerPrefills(facts, pool, tier, self.selection, clock)
        self.tier_lookup = TierLookup(
            pool, self.fetches, self.selection, self.peer_prefills, self.steps, clock
        )
        self.workload = Workload(facts, self.requests, self.steps, self.cost_model, clock)

    def stats(self) -> dict[str, Any]:
        """Totals since the start; JSON-able. Called by the replica's background thread."""
        rate = self.prefill_rate.tokens_per_second
        reused = self._hits.total - self._hits.prefix_cache - self._hits.computed
        return {
            "vllm": vllm.__version__,
            "vllm_untested": vllm_versions.is_newer(vllm.__version__),
            "hits": asdict(self._hits),
            "first_tokens": asdict(self.first_tokens.seconds),
            "prompts": asdict(self._beginnings.counts),
            "requests": self._finished_requests,
            "scheduler_errors": self.errors.count,
            "longest_scheduling_wait_s": self.tier_lookup.longest_scheduling_wait,
            "prefill_tokens_per_s": rate,
            "seconds_saved": reused / rate if rate else 0.0,
            "fetch_decisions": self.cost_model.report(),
            "waits": asdict(self.peer_prefills.counts),
        }

    def _can_audit(self, tokens: int) -> bool:
        """True if the engine is idle and has computed at least `tokens` prompt tokens."""
        return not self.requests and self._hits.computed >= tokens

    # -- requests -----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        request = Request(req_context, self.facts.layout, excluded=not self.facts.shares)
        self.requests[req_context.req_id] = request
        req_context.set_state(request)
        return RequestOffloadingContext()

    def begin_lookups(
        self,
        req_id: str,
        prefix_tokens: int,
        lora_request: LoRARequest | None = None,
        salt: str | None = None,
        ambiguous: bool = False,
        reuses_parts: bool = False,
    ) -> bool:
        """vLLM has `prefix_tokens` of the request in its own cache and looks up the rest. If its
        keys are `ambiguous`, another prompt can have them, too. If it `reuses_parts` of blocks, it
        does not tell of which. False if it must ask again later, before it schedules the request
        and loads its adapter."""
        request = self.requests[req_id]
        reuses = prefix_tokens > 0 or reuses_parts
        request.looked_up(prefix_tokens, reuses, self._prefix_cache_is_stale)
        try:
            self._idle_wait.before_lookups(self.requests.keys(), request.pending)
            if salt is not None and (probe := self.probes.by_salt(salt)) is not None:
                request.probe, request.counted.prompt = probe, True
                request.stop_fetching()
            request.salt = salt
            if ambiguous:
                request.excluded, self._all_share = True, False
            if lora_request is not None:
                self._all_share = False
                if request.adapter is None:
                    request.adapter = self.adapters.look(lora_request)
                else:
                    self.adapters.look_again(lora_request)
                if request.adapter.is_awaited(self._clock()):
                    return False
                request.see_adapter()
        except Exception:
            self.errors.caught("begin_lookups")
            request.excluded, self._all_share = True, False
        return True

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        try:
            row_key: bytes = key
            if not self._all_share:
                request = _request_of(req_context)
                if not request.shares:
                    return MISS
                row_key = request.row_key(key)
            if row_key in self._held and self.pool.lookup(row_key) is not None:
                return HIT
            request = self.requests[req_context.req_id]
            if (
                request.phase is Phase.COMPUTING
                and row_key not in self._fetch_of_chunk
                and not self._holders(row_key)
            ):
                return MISS  # most are like this
            return self.tier_lookup.lookup(row_key, request)
        except Exception:
            self.errors.caught("lookup")
            _request_of(req_context).stop_fetching()
            return MISS

    @guarded(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.pass_end_is_due = True
        self._confirm()
        ended = self.tier_lookup.end_pass()
        self._idle_wait.pass_ended(ended)
        # A step that begins a fetch has done enough.
        evicted = ended.begun is None and self._evictor.evict_ahead()
        self.pass_end_is_due = ended is not NOTHING or evicted or bool(self._unconfirmed)

    @guarded(nothing)
    def count_prompt(
        self, req_id: str, prompt: int, loaded: int, tokens: Sequence[int] | None = None
    ) -> None:
        """The request was scheduled; of its `prompt` tokens, `loaded` are loaded.

        `tokens` are the prompt's, if its rows depend on nothing else, such as images. After an
        asynchronous load vLLM schedules the request again, which does not count.
        """
        request = self.requests[req_id]
        if request.counted.prompt:
            return
        request.counted.prompt = True
        request.answer_start = prompt
        if not request.source:  # else its own rows may be among them
            self.pool.end_probation(request.row_keys())
            self._beginnings.scheduled(request, prompt, request.prefix_tokens + loaded)
        self.workload.scheduled(req_id, prompt, request.prefix_tokens + loaded)
        self.tier_lookup.scheduled(request)
        rows = request.loading
        fetched = [request.fetched[row.key] for row in rows if row.key in request.fetched]
        disk = loaded * fetched.count(DISK) // max(1, len(rows))
        remote = loaded * len(fetched) // max(1, len(rows)) - disk
        if rows and tokens is not None and self.probes.wants_audit():
            self.probes.loaded(tokens, rows, request.ends())
        computed = max(0, prompt - request.prefix_tokens - loaded)
        hits = Hits(request.prefix_tokens, loaded - disk - remote, disk, remote, computed)
        add(self._hits, hits)
        add(self._unreported, hits)
        request.source = hits.main

    @guarded(nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self.requests.pop(req_context.req_id)
        self._finished_requests += request.probe is None
        # vLLM does not report its own hits. In reverse, so that a prefix is evicted from its end.
        self.pool.touch(reversed(keys := request.row_keys()))
        self.finished.append(keys)
        self.tier_lookup.finished(request)
        if request.probe is not None:
            self.probes.ended(request.probe)

    # -- steps --------------------------------------------------------------------------------

    @guarded(nothing)
    def wait_if_idle(self) -> None:
        """Wait in a step without tokens: see `IdleWait.nothing_runs`."""
        if not (self.steps.computing or self._jobs):
            self._idle_wait.nothing_runs(self.requests.keys())

    def has_pending_work(self) -> bool:
        return bool(self.fetches or self._unconfirmed)

    # -- loading and storing ------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        request = _request_of(req_context)
        rows = self.pool.pin([request.row_key(key) for key in keys])
        # Every key was a HIT in this step, and nothing was evicted since. Loading anything else
        # would produce wrong tokens, which is worse than a dead engine.
        assert len(rows) == len(keys), "a chunk was lost between its lookup and its load"
        self._jobs.begin_load(request, rows)
        return CPULoadStoreSpec([row.slot for row in rows])

    @guarded(nothing)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._jobs.end_load(_request_of(req_context))

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> "CacheHitSource":
        """The source under which vLLM 0.32 and later count the chunk. vLLM asks after
        `count_prompt`."""
        request = _request_of(req_context)
        return load_source(request.fetched.get(request.row_key(key)))

    @guarded(_nothing_to_store)
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        request = _request_of(req_context)
        request.see_adapter()
        if not request.stores:
            return _nothing_to_store()
        if request.probe is not None:  # the others would only evict something
            ends = request.ends()
            keys = [key for key in keys if ends.get(key[: GROUP.start]) in request.probe.layers]
        offered = {request.row_key(key): key for key in keys}
        if self._tier.peers.neighbours:
            is_near = self._tier.is_near
            offered = {key: its for key, its in offered.items() if not is_near(key)}
        rows, evicted = self._evictor.reserve(offered, request.row_keys() or list(offered))
        stored = {offered[row.key]: row for row in rows}
        positions = key_positions(req_context)
        for key, row in stored.items():
            row.probation = positions[key] > request.answer_start
        self._jobs.begin_store(request, stored.items())
        return PrepareStoreOutput(
            keys_to_store=[*stored],
            store_spec=CPULoadStoreSpec([row.slot for row in rows]),
            evicted_keys=[OffloadKey(key) for key in evicted],
        )

    def void_store(self, req_id: str, keys: Collection[OffloadKey]) -> None:
        """vLLM's workers do not get all blocks of these chunks."""
        self._jobs.void_store(req_id, keys)

    @guarded(nothing)
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        request = _request_of(req_context)
        if request.probe is not None and success:
            taken = self._jobs.take_store(request, keys)
            self.probes.stored(request.probe, taken, request.ends())
            return
        rows = self._jobs.end_store(request, keys, success)
        if request.adapter is None:
            self._share(rows)
        elif rows:
            look = self.adapters.look(request.adapter.request)
            self._unconfirmed.append(Unconfirmed(request.adapter, look, rows))
            self.pass_end_is_due = True

    def _share(self, rows: Sequence[Row]) -> None:
        if stored := [row for row in rows if self.pool.commit(row)]:
            self._tier.on_stored(stored)

    def _confirm(self) -> None:
        """Share what adapters have computed whose files have not changed since."""
        now = self._clock()
        while self._unconfirmed and self._unconfirmed[0].has_answer(now):
            computed = self._unconfirmed.popleft()
            if computed.is_confirmed:
                self._share(computed.rows)
            self.pool.abort(*computed.rows)

    # -- the whole cache ----------------------------------------------------------------------

    def reset_cache(self) -> None:
        """vLLM forgot all blocks and will not report the jobs under way.

        Requests that go on have stale blocks, until vLLM looks them up again.
        """
        self._jobs.reset()
        self.probes.reset()
        self.tier_lookup.reset(self.requests.values())
        self._tier.reset()

    def on_weights_changed(self) -> None:
        """vLLM keeps its own prefix cache although other weights may have computed it."""
        self._prefix_cache_is_stale = True

    def on_prefix_cache_reset(self, done: bool) -> None:
        """vLLM tried to empty its own prefix cache, which it refuses while any block is in use."""
        self._prefix_cache_is_stale = not done
        if done:
            looks = (request.adapter for request in self.requests.values())
            self.adapters.forget_replaced(
                {look.request.lora_int_id for look in looks if look is not None}
            )

    def rejoin(self, weights_version: str) -> None:
        """Share with the replicas of these weights what is computed from now on."""
        self._tier.rejoin(weights_version)

    def on_reset_flushed(self) -> None:
        """No job from before the reset is under way. vLLM 0.33 and later call this, too."""
        self._jobs.free_stale()

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """The increase since the last call; None after most steps, which increase nothing."""
        if not self._unreported.total:
            return None
        hits, self._unreported = self._unreported, Hits()
        return stats_of(hits)


def _request_of(context: ReqContext) -> Request:
    """The request, even after its end: vLLM stores its last chunks then."""
    request: Request | None = context.get_state(Request)
    assert request is not None, "vLLM announces each request"
    return request
