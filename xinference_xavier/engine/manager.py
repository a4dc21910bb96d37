"""Decides, for vLLM's scheduler, which chunks are at hand, and brings in those that peers hold.

Threading: every method is called by the scheduler thread, works on dictionaries only and returns at
once, but for `idle`; what takes longer is handed to the replica's background thread. Only this
thread evicts rows, and only in `on_schedule_end` and `prepare_store`: a HIT stays one until the end
of its scheduling step.

A request's way through `lookup`, one scheduling attempt ("pass") after the other:

    first pass      HITs from the pool, then RETRY for each chunk that a peer holds, MISS at the end
    on_schedule_end one fetch is begun for the chunks that got a RETRY
    further passes  RETRY while the fetch is under way and the request has time left
    then            HIT for what arrived, MISS for the rest; once more if all of it arrived

Before a long MISS, RETRY until the tracker has said whether a peer is computing it, and for as long
as waiting for that peer is expected to pay (`Wait`).
"""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

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

from xinference_xavier.engine.decision_time import DecisionTime
from xinference_xavier.engine.forecast import Forecast
from xinference_xavier.engine.metrics import HitReporter, Hits
from xinference_xavier.engine.prefill_rate import PrefillRate
from xinference_xavier.engine.versions import known_keys, load_source
from xinference_xavier.engine.waiting import WORTH_ASKING, Wait, WaitCounts
from xinference_xavier.explanation import Chunker
from xinference_xavier.pool.pool import Pool, Reservation, Row
from xinference_xavier.replica import Replica
from xinference_xavier.transfer.fetch import Fetch, FetchState

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

_GROUP = slice(-4, None)  # the part of an offload key that numbers its KV-cache group
_LOOK = 0.005  # seconds, at most, between two looks at a fetch while there is nothing else to do


class _Request:
    """What is on about one request."""

    __slots__ = (
        "asked",
        "computes",
        "context",
        "deadline",
        "fetch",
        "fetched",
        "first",
        "given_up",
        "pending_since",
        "trace_headers",
        "wait",
        "wanted",
    )

    def __init__(self, context: ReqContext) -> None:
        self.context = context
        self.wanted: list[bytes] = []  # this pass's RETRYs, to be fetched
        self.fetch: Fetch | None = None
        self.first: set[bytes] = set()  # the fetch's first chunk of each group
        self.deadline: float | None = None  # of all its waiting together
        self.pending_since = 0.0  # on `DecisionTime`'s clock
        self.given_up = False
        self.computes = False  # what it could have fetched, as that is expected to be quicker
        self.fetched: set[bytes] = set()  # came from a peer for this request
        self.trace_headers: Mapping[str, str] | None = None
        self.asked = False  # who computes what nobody has, or whether to ask
        self.wait: Wait | None = None  # for who does; stays when it is over

    def conclude(self) -> None:
        """The fetch is over for us: what it brought are HITs, what it did not are MISSes."""
        if self.fetch is not None:
            self.fetched.update(row.key for row in self.fetch.committed)
            self.given_up = self.fetch.state is not FetchState.COMMITTED
            self.fetch = None


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
        """With `choose`, longer runs than `min_fetch_tokens` are fetched where that is expected to
        be quicker than computing them; without, in any case."""
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._min_fetch_chunks = max(1, -(-min_fetch_tokens // chunk_tokens))
        self._choose = choose
        self._fetch_timeout = fetch_timeout
        self._clock = clock
        self._replica: Replica
        self._requests: dict[str, _Request] = {}
        self._gathered: dict[str, _Request] = {}  # got a RETRY in this step, fetch to be begun
        self._fetches: dict[Fetch, set[str]] = {}  # live ones and the requests that wait for them
        self._fetching: dict[bytes, Fetch] = {}  # by chunk
        self._storing: dict[bytes, Row] = {}
        self._loading: dict[str, list[Row]] = {}  # by request; pinned for a worker's load
        self._stale_stores: list[Row] = []  # of before the last reset: their jobs may still write
        self._stale_loads: list[Row] = []  # likewise, may still read
        self._hits = Hits()
        self._reporter = HitReporter(self._hits)
        self._finished_requests = 0
        self.prefill_rate = PrefillRate()
        self._forecast = Forecast(row_bytes=row_bytes)
        self.step_tokens = chunk_tokens  # that the engine computes at once, at most
        self._waits = WaitCounts()
        # Requests in this step, by group, and how many seconds nothing is lost by.
        self._deferred: dict[tuple[str, bytes], float] = {}
        self._pause = 0.0  # the least of them
        self.decision_time = DecisionTime()

    def attach(self, replica: Replica) -> None:
        """The replica that fetches and shares for this engine; before anything else."""
        self._replica = replica

    def explain_with(self, chunker: Chunker) -> None:
        """How the replica finds the chunks of a prompt that somebody asks about."""
        self._replica.chunker = chunker

    def stats(self) -> dict[str, Any]:
        """Called by the replica's background thread."""
        rate = self.prefill_rate.tokens_per_second
        reused = self._hits.own_pool + self._hits.peers
        return {
            "hits": asdict(self._hits),
            "requests": self._finished_requests,
            "longest_decision_s": self.decision_time.longest,
            "prefill_tokens_per_s": rate,
            "seconds_saved": reused / rate if rate else 0.0,
            "forecast": self._forecast.report(),
            "waits": asdict(self._waits),
        }

    def trace(self, req_id: str, headers: Mapping[str, str]) -> None:
        """The request belongs to the trace that these headers name, and so does its fetch."""
        self._requests[req_id].trace_headers = headers

    # -- looking up ---------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._pool.sweep()  # between two steps
        self._requests[req_context.req_id] = _Request(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._pool.lookup(key) is not None:
            return LookupResult.HIT
        request = self._requests[req_context.req_id]
        fetch = request.fetch
        if fetch is not None:
            if fetch.state is FetchState.PENDING and self._has_time(request):
                # One RETRY per group defers the request; MISS for the rest ends the scan early.
                if key not in request.first:
                    return LookupResult.MISS
                self._deferred[req_context.req_id, key[_GROUP]] = 0.0
                return LookupResult.RETRY
            self._conclude(request)
        if request.given_up or not (self._has_time(request) or self._is_waiting(request)):
            return LookupResult.MISS
        if not self._is_elsewhere(key, request, req_context):
            waits = not request.wanted and self._waits_for_peer(key, request)
            return LookupResult.RETRY if waits else LookupResult.MISS
        request.wanted.append(key)
        self._gathered[req_context.req_id] = request
        return LookupResult.RETRY

    def _has_time(self, request: _Request) -> bool:
        return request.deadline is None or self._clock() < request.deadline

    def _conclude(self, request: _Request) -> None:
        if request.fetch is not None:
            request.conclude()
            self.decision_time.decided(request.pending_since, self._clock())

    def _is_elsewhere(self, key: bytes, request: _Request, context: ReqContext) -> bool:
        if self._under_way(key) is not None:
            return True
        if not self._replica.can_fetch:
            return False
        holders = self._replica.mirror.holders(key)
        if not holders or self._pool.holds(key):
            return False
        return bool(request.wanted) or self._is_worth_fetching(key, holders, request)

    def _is_worth_fetching(self, key: bytes, holders: tuple[str, ...], request: _Request) -> bool:
        """Whether a peer holds enough chunks from `key` on, but for those that are here.

        A RETRY can cost the request a whole step of the engine, so this is asked before. Peers hold
        whole prefixes: who has the last of enough chunks has those before it.
        """
        group = _group_of(key, request.context)
        if key not in group:  # an older vLLM, which tells no keys in advance
            return True
        place = group.index(key)
        rest = len(group) - place
        leasts = ((peer, self._least(peer, request, place, rest)) for peer in holders)
        if any(self._reaches(peer, group, place + least) for peer, least in leasts):
            return True
        enough = place + self._min_fetch_chunks
        if not request.computes and any(self._reaches(peer, group, enough) for peer in holders):
            request.computes = True
            self._forecast.choices.computed += 1
        return False

    def _least(self, peer: str, request: _Request, place: int, chunks: int) -> int:
        """How many chunks are worth a fetch from this peer, if each takes to be computed what these
        `chunks` from `place` on do in the mean."""
        if not self._choose:
            return self._min_fetch_chunks
        groups = len({key[_GROUP] for key in known_keys(request.context)}) or 1
        seconds = self._computing(place, chunks)
        each = None if seconds is None else seconds / chunks
        return max(self._min_fetch_chunks, self._forecast.least(peer, groups, each, self._clock()))

    def _computing(self, place: int, chunks: int) -> float | None:
        """The seconds that the chunks of a prompt from `place` on take; None if nobody knows."""
        first = place * self._chunk_tokens
        return self.prefill_rate.seconds(first, first + chunks * self._chunk_tokens)

    def _reaches(self, peer: str, group: Sequence[bytes], count: int) -> bool:
        """Whether the last of the group's first `count` chunks is at the peer, or here."""
        if count > len(group):
            return False
        last = group[count - 1]
        return peer in self._replica.mirror.holders(last) or self._pool.lookup(last) is not None

    # -- waiting for peers that compute -------------------------------------------------------

    def _waits_for_peer(self, key: bytes, request: _Request) -> bool:
        """True once in a step for each group: that defers the request."""
        group = (request.context.req_id, key[_GROUP])
        if not request.asked:
            request.asked = True
            request.wait = self._ask(key, request)
        if group in self._deferred or not self._is_waiting(request):
            return False
        if not self._may_become_worth_fetching(key, request):
            return False
        assert request.wait is not None
        self._deferred[group] = request.wait.pause
        request.deadline = None  # is for what a peer holds
        return True

    def _is_waiting(self, request: _Request) -> bool:
        wait, can_fetch = request.wait, self._replica.can_fetch
        return wait is not None and can_fetch and wait.goes_on(self._is_computed, self._clock())

    def _ask(self, key: bytes, request: _Request) -> Wait | None:
        """Who computes what nobody has from `key` on, if that takes so long that it is worth it."""
        mirror = self._replica.mirror
        if not (self._replica.can_fetch and mirror.enabled and mirror.peers):
            return None
        if mirror.holders(key):  # and it was not worth fetching
            return None
        group = _group_of(key, request.context)
        rest = list(itertools.dropwhile(lambda other: other != key, group))
        place = len(group) - len(rest)

        def alone(chunks: int) -> float:
            return self._computing(place, chunks) or 0.0

        seconds = alone(len(rest))
        if seconds < WORTH_ASKING or len(rest) < self._min_fetch_chunks:
            return None
        claim = self._replica.claim(rest, seconds)
        return Wait(claim, alone, -(-self.step_tokens // self._chunk_tokens), self._clock())

    def _may_become_worth_fetching(self, key: bytes, request: _Request) -> bool:
        """False where even all that is to come from `key` on would be computed sooner."""
        holders = self._replica.mirror.holders(key)
        if not holders:
            return True
        group = _group_of(key, request.context)
        place = group.index(key)
        rest = len(group) - place
        return any(self._least(peer, request, place, rest) <= rest for peer in holders)

    def _is_computed(self, key: bytes) -> bool:
        return bool(self._replica.mirror.holders(key)) or self._pool.lookup(key) is not None

    # -- fetching -----------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for req_id, request in self._gathered.items():
            self._begin_fetch(req_id, request)
            request.wanted = []
        self._gathered.clear()
        if self._fetches:
            self._settle_fetches()
        self._pause = min(self._deferred.values(), default=0.0)
        self._deferred.clear()
        self._pool.sweep()

    def idle(self) -> None:
        """Nothing was scheduled. Who asks at once whether anything has changed takes processor time
        and Python's lock from those who work on it, on this host or in this process."""
        if self._loading or self._storing:  # the worker may not have been told yet
            return
        pending = (fetch for fetch in self._fetches if fetch.state is FetchState.PENDING)
        fetch = next(pending, None)
        if fetch is not None:
            fetch.ended.wait(_LOOK)
        else:
            time.sleep(self._pause)

    def _begin_fetch(self, req_id: str, request: _Request) -> None:
        now = self._clock()
        if request.deadline is None or now >= request.deadline:
            request.deadline = now + self._fetch_timeout
            request.pending_since = self.decision_time.idle_time(now)
        fetch = self._under_way(request.wanted[0]) or self._new_fetch(request, now)
        if fetch is None:
            request.given_up = True
            return
        request.fetch = fetch
        request.first = _first_of_each_group(request.wanted)
        self._fetches.setdefault(fetch, set()).add(req_id)

    def _under_way(self, key: bytes) -> Fetch | None:
        """The fetch that brings `key`, or has just brought it."""
        fetch = self._fetching.get(key)
        return None if fetch is None or fetch.state is FetchState.ROLLED_BACK else fetch

    def _new_fetch(self, request: _Request, now: float) -> Fetch | None:
        assert request.deadline is not None
        donor, keys = self._choose_donor(request.wanted, now)
        if self._choose and len({key[_GROUP] for key in keys}) == 1:
            keys = keys[: self._forecast.rows_within(donor, request.deadline - now, now)]
        place, chunks = self._spared(keys, request)
        if not chunks or chunks < self._least(donor, request, place, chunks):
            return None
        rows = self._reserve(keys, known_keys(request.context) or request.wanted).rows
        if not rows:
            return None
        for row in rows:
            row.copy_of = donor
        fetch = self._replica.fetch(donor, rows, request.deadline, request.trace_headers)
        if fetch is not None:
            self._fetching.update((row.key, fetch) for row in rows)
            self._forecast.begun(fetch, self._computing(place, chunks), now)
        return fetch

    def _spared(self, keys: Sequence[bytes], request: _Request) -> tuple[int, int]:
        """From where on how many chunks of one group need not be computed once `keys` are here:
        these, and those behind them that are here already."""
        if not keys:
            return 0, 0
        group = _group_of(keys[0], request.context)
        fetched = set(keys)
        rest = list(itertools.dropwhile(lambda key: key not in fetched, group))
        if not rest:  # an older vLLM
            return 0, len(keys)
        at_hand = itertools.takewhile(lambda key: key in fetched or self._pool.lookup(key), rest)
        return len(group) - len(rest), sum(1 for _ in at_hand)

    def _choose_donor(self, keys: Sequence[bytes], now: float) -> tuple[str, list[bytes]]:
        """A peer that holds the longest run from the first key on, and that run. Of several, the
        one from which it is expected to be here first, and any of those that seem equal: so that
        they have about the same to do."""
        holders = self._replica.mirror.holders

        def run(donor: str) -> int:
            return sum(1 for _ in itertools.takewhile(lambda key: donor in holders(key), keys))

        runs = {donor: run(donor) for donor in holders(keys[0])}
        if not runs:
            return "", []
        longest = max(runs.values())
        asked = Counter(fetch.donor for fetch in self._fetches)

        def rank(donor: str) -> tuple[float, int, float]:
            seconds = self._forecast.seconds(donor, longest, now)
            return seconds * (1 + asked[donor]), asked[donor], random.random()

        best = min((donor for donor in runs if runs[donor] == longest), key=rank)
        return best, list(keys[:longest])

    def _settle_fetches(self) -> None:
        """Take note of ended fetches; let go of their rows when nobody waits for them any more."""
        now = self._clock()
        for fetch, waiting in list(self._fetches.items()):
            if fetch.state is FetchState.PENDING:
                continue
            self._forecast.ended(fetch)
            for row in fetch.rows:
                if self._fetching.get(row.key) is fetch:
                    del self._fetching[row.key]
            # A waiting request comes for its rows at once, unless it finds no room: not for ever.
            if not waiting or now > fetch.deadline + self._fetch_timeout:
                self._pool.unpin(fetch.committed)
                del self._fetches[fetch]

    def _stop_waiting(self, req_id: str) -> None:
        for waiting in self._fetches.values():
            waiting.discard(req_id)

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
        self._replica.evicted(reservation.evicted)
        return reservation

    def _is_spare(self, row: Row) -> bool:
        """Whether the peer that it was copied from has it still, and so can give it again."""
        return row.copy_of is not None and row.copy_of in self._replica.mirror.holders(row.key)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._free_stale()
        rows = [self._storing.pop(key) for key in keys]
        if success:
            self._replica.stored([row for row in rows if self._pool.commit(row)])
        else:
            for row in rows:
                self._pool.abort(row)

    # -- the rest -----------------------------------------------------------------------------

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Called by vLLM up to 0.30 only."""
        self._pool.touch(reversed(list(keys)))

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._finished_requests += 1
        self._stop_waiting(req_context.req_id)
        self._gathered.pop(req_context.req_id, None)
        # vLLM does not say which chunks its own prefix cache served, and those are in use as well.
        # From the tail on, so that a prefix is evicted from its end.
        self._pool.touch(reversed(known_keys(req_context)))
        wait = self._requests.pop(req_context.req_id).wait
        if wait is not None:
            wait.count(self._waits, self._clock())
            if not wait.claim.elsewhere:
                self._replica.release_claim(wait.claim)

    def reset_cache(self) -> None:
        """vLLM has forgotten all blocks and will not report what is under way now."""
        self._stale_stores += self._storing.values()
        self._storing.clear()
        for rows in self._loading.values():
            self._stale_loads += rows
        self._loading.clear()
        for request in self._requests.values():
            waited = request.fetch is not None or request.wait is not None
            request.given_up = request.given_up or waited
            request.fetch = None
            request.wanted = []
        self._gathered.clear()
        self._fetching.clear()
        for waiting in self._fetches.values():
            waiting.clear()
        self._replica.reset()

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
        self._hits.own_prefix_cache += own_prefix
        self._hits.own_pool += loaded - peers
        self._hits.peers += peers
        self._hits.computed += max(0, prompt - own_prefix - loaded)
        self._stop_waiting(req_id)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> "CacheHitSource":
        """Called by vLLM from 0.32 on, after `count_prompt`."""
        return load_source(key in self._requests[req_context.req_id].fetched)

    def shutdown(self) -> None:
        self._replica.stop()


def _group_of(key: bytes, context: ReqContext) -> list[bytes]:
    """The keys of the request's chunks in the KV-cache group of `key`, in order."""
    return [other for other in known_keys(context) if other[_GROUP] == key[_GROUP]]


def _first_of_each_group(keys: Iterable[bytes]) -> set[bytes]:
    first: dict[bytes, bytes] = {}
    for key in keys:
        first.setdefault(key[_GROUP], key)
    return set(first.values())
