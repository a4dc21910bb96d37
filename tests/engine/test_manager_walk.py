"""In whatever order events come, no slot has two users, no lookup waits beyond its deadline, and in
the end nothing is pinned, reserved or pending."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, OffloadKey

from tests.engine.scheduling import FETCH_TIMEOUT, Request, Scheduling, assert_nothing_left, chunks
from xinference_xavier.pool.tier import Fetch, FetchState

SLOTS = 8
PROMPTS = ("one", "two")
LENGTH = 6


class Job(NamedTuple):
    """A worker's copy from or to slots, until `complete_load` or `complete_store`."""

    request: Request
    is_store: bool
    keys: list[OffloadKey]
    slots: list[int]


class Walk(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.vllm = Scheduling(SLOTS, min_fetch_chunks=2)
        self.arrived = 0
        self.jobs: list[Job] = []
        self.stale: list[Job] = []  # from before a reset: under way, but not reported
        self.waiting_since: dict[str, float] = {}
        self.unfinished: list[Request] = []
        self.abandoned: list[Fetch] = []

    # -- requests -----------------------------------------------------------------------------

    @rule(
        target=requests,
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, LENGTH),
    )
    def arrive(self, prompt: str, length: int) -> Request:
        self.arrived += 1
        keys = chunks(prompt, length)
        request = self.vllm.arrive(f"r{self.arrived}", keys)
        self.unfinished.append(request)
        return request

    def is_over(self, request: Request) -> bool:
        return request not in self.unfinished or any(job.request is request for job in self.jobs)

    @rule(request=requests, own_prefix=st.integers(0, 3), room=st.booleans())
    def attempt(self, request: Request, own_prefix: int, room: bool) -> None:
        """Look up one request. With `room`, vLLM has blocks for it."""
        if self.is_over(request):
            return
        now = self.vllm.clock.now
        hits = self.vllm.scan(request, own_prefix)
        if hits is None:
            since = self.waiting_since.setdefault(request.req_id, now)
            assert now < since + FETCH_TIMEOUT
        elif room:
            slots = self.vllm.schedule(request, hits, own_prefix)
            if hits:
                keys = list(request.keys[own_prefix : own_prefix + hits])
                assert self.written().isdisjoint(slots)
                self.jobs.append(Job(request, False, keys, slots))
        self.vllm.end_step()

    @rule(request=requests, start=st.integers(0, LENGTH))
    def store(self, request: Request, start: int) -> None:
        loading = any(job.request is request and not job.is_store for job in self.jobs)
        if request not in self.unfinished or loading:
            return
        output = self.vllm.manager.prepare_store(request.keys[start:], request.context)
        assert output is not None
        assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
        slots = output.store_spec.block_ids.tolist()
        assert self.in_use().isdisjoint(slots)
        if slots:
            self.jobs.append(Job(request, True, output.keys_to_store, slots))
        self.vllm.end_step()

    @rule(request=requests)
    def finish(self, request: Request) -> None:
        if request in self.unfinished:
            self.unfinished.remove(request)
            self.vllm.finish(request)
            self.vllm.end_step()

    @rule(which=st.integers(0, 100), success=st.booleans())
    def complete(self, which: int, success: bool) -> None:
        if not self.jobs:
            return
        job = self.jobs.pop(which % len(self.jobs))
        self.stale.clear()  # workers finish these before they begin a later job
        if job.is_store:
            self.vllm.manager.complete_store(set(job.keys), job.request.context, success)
        else:
            self.vllm.manager.complete_load(set(job.keys), job.request.context)

    @rule()
    def reset(self) -> None:
        self.vllm.manager.reset_cache()
        self.stale += self.jobs
        self.jobs = []

    # -- peers --------------------------------------------------------------------------------

    @rule(a=st.integers(0, LENGTH), b=st.integers(0, LENGTH), c=st.integers(0, LENGTH))
    def publish(self, a: int, b: int, c: int) -> None:
        one, two = PROMPTS
        self.vllm.tier.peers_hold(a=chunks(one, a) + chunks(two, c), b=chunks(one, b))

    def pending(self) -> list[Fetch]:
        return [f for f in self.vllm.tier.fetches if f.state is FetchState.PENDING]

    @rule(which=st.integers(0, 100), whole=st.integers(0, LENGTH))
    def end_fetch(self, which: int, whole: int) -> None:
        if pending := self.pending():
            self.vllm.tier.end(pending[which % len(pending)], whole)

    @rule(which=st.integers(0, 100))
    def abandon_fetch(self, which: int) -> None:
        if pending := self.pending():
            fetch = pending[which % len(pending)]
            self.vllm.tier.abandon(fetch)
            self.abandoned.append(fetch)

    @rule()
    def drain_fetches(self) -> None:
        for fetch in self.abandoned:
            self.vllm.tier.drain(fetch)
        self.abandoned.clear()

    @rule(seconds=st.sampled_from([0.1, FETCH_TIMEOUT, 3 * FETCH_TIMEOUT]))
    def wait(self, seconds: float) -> None:
        self.vllm.clock.now += seconds
        self.vllm.end_step()

    # -- what must hold -----------------------------------------------------------------------

    def written(self) -> set[int]:
        """Slots that may still be written."""
        by_workers = {s for job in self.jobs + self.stale if job.is_store for s in job.slots}
        return by_workers | {row.slot for f in self.pending() + self.abandoned for row in f.rows}

    def in_use(self) -> set[int]:
        return self.written() | {s for job in self.jobs + self.stale for s in job.slots}

    @invariant()
    def every_hit_has_its_own_slot_that_nobody_writes(self) -> None:
        rows = [self.vllm.pool.lookup(key) for prompt in PROMPTS for key in chunks(prompt, LENGTH)]
        slots = [row.slot for row in rows if row is not None]
        assert len(set(slots)) == len(slots)
        assert self.written().isdisjoint(slots)

    @invariant()
    def rows_being_loaded_do_not_change(self) -> None:
        for job in self.jobs:
            if not job.is_store:
                rows = [self.vllm.pool.lookup(key) for key in job.keys]
                assert [row.slot for row in rows if row is not None] == job.slots

    def teardown(self) -> None:
        while self.jobs:
            self.complete(0, True)
        for fetch in self.pending():
            self.vllm.tier.end(fetch, 1)
        self.drain_fetches()
        while self.unfinished:
            self.finish(self.unfinished[0])
        last = chunks("last", 1)
        self.vllm.fill(last)  # a job that begins after every reset
        self.vllm.end_step()
        assert_nothing_left(self.vllm)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
