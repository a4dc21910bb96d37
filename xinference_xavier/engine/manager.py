"""vLLM's offloading manager over the pool and a tier of peers.

Threading: the scheduler thread calls every method but `stats`. A method works on dictionaries and
returns at once; slow work goes to the replica's background thread. Only this thread evicts rows,
and only in `on_schedule_end` and `prepare_store`, so a HIT stays one for its scheduling step.

Chunks that are in the pool are answered here, all others by `TierLookup`.
"""

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
from xinference_xavier.engine.jobs import Jobs
from xinference_xavier.engine.metrics import HitReporter, Hits
from xinference_xavier.engine.policy.cost_model import CostModel
from xinference_xavier.engine.policy.donor_selection import DonorSelection, FetchPolicy
from xinference_xavier.engine.policy.prefill_rate import PrefillRate
from xinference_xavier.engine.request import Request
from xinference_xavier.engine.steps import Step, Steps
from xinference_xavier.engine.tier_lookup import TierLookup
from xinference_xavier.pool.pool import Pool, Reservation, Row
from xinference_xavier.replica.explain import Chunker
from xinference_xavier.tiers.base import Tier

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource


class XavierManager(OffloadingManager):
    """`on_shutdown` ends the owner of `tier`."""

    def __init__(
        self,
        pool: Pool,
        tier: Tier,
        *,
        chunk_tokens: int,
        row_bytes: int,
        min_fetch_tokens: int,
        fetch_policy: FetchPolicy,
        fetch_timeout: float,
        on_shutdown: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._chunk_tokens = chunk_tokens
        self._on_shutdown = on_shutdown
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._finished_requests = 0
        self._jobs = Jobs(pool)
        self._hits = Hits()
        self._hit_reporter = HitReporter(self._hits)
        self._steps = Steps()
        self.chunker: Chunker | None = None  # set by the connector
        self.prefill_rate = PrefillRate()
        self.cost_model = CostModel(row_bytes=row_bytes)
        self.tier_lookup = TierLookup(
            pool,
            tier,
            selection=DonorSelection(
                pool,
                tier,
                self.prefill_rate,
                self.cost_model,
                chunk_tokens=chunk_tokens,
                min_fetch_tokens=min_fetch_tokens,
                policy=fetch_policy,
            ),
            cost_model=self.cost_model,
            steps=self._steps,
            reserve=self._reserve,
            chunk_tokens=chunk_tokens,
            fetch_timeout=fetch_timeout,
            clock=clock,
        )

    def stats(self) -> dict[str, Any]:
        """Called by the replica's background thread."""
        rate = self.prefill_rate.tokens_per_second
        reused = self._hits.local_pool + self._hits.remote
        return {
            "vllm": vllm.__version__,
            "hits": asdict(self._hits),
            "requests": self._finished_requests,
            "longest_scheduling_wait_s": self.tier_lookup.longest_scheduling_wait,
            "prefill_tokens_per_s": rate,
            "seconds_saved": reused / rate if rate else 0.0,
            "forecast": self.cost_model.report(),
            "waits": asdict(self.tier_lookup.wait_counts),
        }

    # -- requests -----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._pool.sweep()  # no lookup waits for a pin between two steps
        self._requests[req_context.req_id] = Request(req_context)
        return RequestOffloadingContext()

    def trace(self, req_id: str, headers: Mapping[str, str]) -> None:
        """The request, and so its fetch, belongs to the trace that these headers name."""
        self._requests[req_id].trace_headers = headers

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._pool.lookup(key) is not None:
            return LookupResult.HIT
        return self.tier_lookup.lookup(key, self._requests[req_context.req_id])

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.tier_lookup.end_pass()
        self._pool.sweep()

    def count_prompt(self, req_id: str, prompt: int, prefix_cache: int, loaded: int) -> None:
        """A request was scheduled. In tokens: its prompt, vLLM's own hit, what we load."""
        request = self._requests[req_id]
        self.tier_lookup.scheduled(request)
        fetched = sum(row.key in request.fetched for row in self._jobs.loading(req_id))
        remote = min(loaded, fetched * self._chunk_tokens)
        self._hits.prefix_cache += prefix_cache
        self._hits.local_pool += loaded - remote
        self._hits.remote += remote
        self._hits.computed += max(0, prompt - prefix_cache - loaded)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._finished_requests += 1
        # vLLM does not report which chunks its own prefix cache served; they are in use as well.
        # From the tail on, so that a prefix is evicted from its end.
        self._pool.touch(reversed(known_keys(req_context)))
        self.tier_lookup.finished(self._requests.pop(req_context.req_id))

    # -- steps --------------------------------------------------------------------------------

    def step_begins(self, tokens: int, prompt_tokens: int, depth: float) -> None:
        """A step was scheduled: see `Step`."""
        self._steps.begin(Step(self._clock(), tokens, prompt_tokens, depth))
        # A job's worker may not have been told of it yet.
        if not self._steps.computing and not self._jobs:
            self.tier_lookup.idle_wait.nothing_scheduled(any(self.tier_lookup.fetches.pending()))

    def step_ends(self) -> None:
        """vLLM has the output of the oldest step that it began."""
        ended = self._steps.end(self._clock())
        if ended is not None:
            step, seconds = ended
            self.prefill_rate.add(step.prompt_tokens, seconds, step.depth)

    def has_pending_work(self) -> bool:
        return bool(self.tier_lookup.fetches)

    # -- loading ------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        rows = self._pool.pin(keys)
        # Each key was a HIT in this step, and nothing was evicted since. To load anything else
        # would be a wrong token, which is worse than a dead engine.
        assert len(rows) == len(keys), "a chunk was lost between its lookup and its load"
        self._jobs.begin_load(req_context.req_id, rows)
        return CPULoadStoreSpec([row.slot for row in rows])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._jobs.end_load(req_context.req_id)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> "CacheHitSource":
        """Called by vLLM from 0.32 on, after `count_prompt`."""
        return load_source(key in self._requests[req_context.req_id].fetched)

    # -- storing ------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        rows, evicted = self._reserve(keys, known_keys(req_context) or list(keys))
        self._jobs.begin_store(rows)
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(row.key) for row in rows],
            store_spec=CPULoadStoreSpec([row.slot for row in rows]),
            evicted_keys=[OffloadKey(key) for key in evicted],
        )

    def _reserve(self, keys: Iterable[bytes], prefix: Sequence[bytes]) -> Reservation:
        """Reserve rows for `keys` without evicting the prefix that they belong to."""
        self._pool.touch(reversed(prefix))
        reservation = self._pool.reserve(keys, frozenset(prefix), self._is_redundant)
        self._tier.on_evicted(reservation.evicted)
        return reservation

    def _is_redundant(self, row: Row) -> bool:
        """Whether the donor of this copy still holds the chunk."""
        donor = row.replicated_from
        return donor is not None and donor in self._tier.holders(row.key)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        rows = self._jobs.end_store(keys, success)
        if rows:
            self._tier.on_stored(rows)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Called by vLLM up to 0.30 only."""
        self._pool.touch(reversed(list(keys)))

    # -- the whole cache ----------------------------------------------------------------------

    def reset_cache(self) -> None:
        """vLLM has forgotten all blocks and will not report the jobs under way."""
        self._jobs.reset()
        self.tier_lookup.reset(self._requests.values())

    def on_reset_flushed(self) -> None:
        """Called by vLLM from 0.33 on: no job from before the last reset is under way."""
        self._jobs.free_stale()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._hit_reporter.delta()

    def shutdown(self) -> None:
        self._on_shutdown()
