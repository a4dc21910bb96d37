"""In whatever order events come, no slot has two users, no lookup waits beyond its deadline, and in
the end nothing is pinned, reserved or pending."""

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, OffloadKey

from tests.engine.scheduling import FETCH_TIMEOUT, Request, Scheduling, assert_nothing_left, chunks
from xinference_xavier.replica.fetcher import Fetch, FetchState

SLOTS = 8
PROMPTS = ("one", "two")
LENGTH = 6
LENGTHS, STARTS = st.integers(0, LENGTH), st.sampled_from([0, 0, 1, 3])
STEPS = 60


class Job(NamedTuple):
    """A worker's copy from or to slots, until `complete_load` or `complete_store`."""

    request: Request
    is_store: bool
    keys: list[OffloadKey]
    slots: list[int]


class Walk:
    """`draw` decides what is left to chance."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.vllm = Scheduling(SLOTS)
        self.arrived = 0
        self.jobs: list[Job] = []
        self.stale: list[Job] = []  # from before a reset: under way, but not reported
        self.waiting_since: dict[str, float] = {}
        self.unfinished: list[Request] = []
        self.abandoned: list[Fetch] = []

    def go_on(self) -> None:
        """One of the events that are possible now, more often those that most requests meet."""
        steps: list[Callable[[], None]] = []
        if self.without_jobs():
            steps += 4 * [self.attempt]
        if self.without_loads():
            steps += 2 * [self.store]
        if self.jobs:
            steps += 4 * [self.complete]
        if self.pending():
            steps += [self.end_fetch, self.end_fetch, self.abandon_fetch]
        if self.abandoned:
            steps += [self.drain_fetches]
        if self.unfinished:
            steps += [self.finish]
        steps += [self.arrive, self.arrive, self.publish, self.publish, self.wait, self.reset]
        self.draw(st.sampled_from(steps))()

    # -- requests -----------------------------------------------------------------------------

    def without_jobs(self) -> list[Request]:
        busy = [job.request for job in self.jobs]
        return [request for request in self.unfinished if request not in busy]

    def without_loads(self) -> list[Request]:
        loading = [job.request for job in self.jobs if not job.is_store]
        return [request for request in self.unfinished if request not in loading]

    def arrive(self) -> None:
        self.arrived += 1
        keys = chunks(self.draw(st.sampled_from(PROMPTS)), self.draw(st.integers(1, LENGTH)))
        self.unfinished.append(self.vllm.arrive(f"r{self.arrived}", keys))

    def attempt(self) -> None:
        """Look up one request, for which vLLM may have blocks."""
        request, own_prefix = self.draw(st.sampled_from(self.without_jobs())), self.draw(STARTS)
        now = self.vllm.clock.now
        hits = self.vllm.scan(request, own_prefix)
        if hits is None:
            since = self.waiting_since.setdefault(request.req_id, now)
            assert now < since + FETCH_TIMEOUT
        elif self.draw(st.booleans()):
            slots = self.vllm.schedule(request, hits, own_prefix)
            if hits:
                keys = list(request.keys[own_prefix : own_prefix + hits])
                assert self.written().isdisjoint(slots)
                self.jobs.append(Job(request, False, keys, slots))
        if self.pending() and self.draw(st.booleans()):
            self.end_fetch()  # on another thread, meanwhile
        self.vllm.end_step()

    def store(self) -> None:
        request, start = self.draw(st.sampled_from(self.without_loads())), self.draw(STARTS)
        output = self.vllm.manager.prepare_store(request.keys[start:], request.context)
        assert output is not None
        assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
        slots = output.store_spec.block_ids.tolist()
        assert self.in_use().isdisjoint(slots)
        if slots:
            self.jobs.append(Job(request, True, output.keys_to_store, slots))
        self.vllm.end_step()

    def finish(self) -> None:
        request = self.draw(st.sampled_from(self.unfinished))
        self.unfinished.remove(request)
        self.vllm.finish(request)
        self.vllm.end_step()

    def complete(self) -> None:
        job = self.draw(st.sampled_from(self.jobs))
        self.jobs.remove(job)
        self.stale.clear()  # workers finish these before they begin a later job
        if job.is_store:
            success = self.draw(st.integers(0, 9)) > 0
            self.vllm.manager.complete_store(set(job.keys), job.request.context, success)
        else:
            self.vllm.manager.complete_load(set(job.keys), job.request.context)

    def reset(self) -> None:
        self.vllm.manager.reset_cache()
        self.stale += self.jobs
        self.jobs = []

    # -- peers --------------------------------------------------------------------------------

    def publish(self) -> None:
        one, two = PROMPTS
        a, b, c = (self.draw(LENGTHS) for _ in range(3))
        self.vllm.tier.peers_hold(a=chunks(one, a) + chunks(two, c), b=chunks(one, b))

    def pending(self) -> list[Fetch]:
        return [f for f in self.vllm.tier.fetches if f.state is FetchState.PENDING]

    def end_fetch(self) -> None:
        self.vllm.tier.end(self.draw(st.sampled_from(self.pending())), self.draw(LENGTHS))

    def abandon_fetch(self) -> None:
        fetch = self.draw(st.sampled_from(self.pending()))
        self.vllm.tier.abandon(fetch)
        self.abandoned.append(fetch)

    def drain_fetches(self) -> None:
        for fetch in self.abandoned:
            self.vllm.tier.drain(fetch)
        self.abandoned.clear()

    def wait(self) -> None:
        self.vllm.clock.now += self.draw(st.sampled_from([0.1, FETCH_TIMEOUT, 3 * FETCH_TIMEOUT]))
        self.vllm.end_step()

    # -- what must hold -----------------------------------------------------------------------

    def written(self) -> set[int]:
        """Slots that may still be written."""
        by_workers = {s for job in self.jobs + self.stale if job.is_store for s in job.slots}
        return by_workers | {row.slot for f in self.pending() + self.abandoned for row in f.rows}

    def in_use(self) -> set[int]:
        return self.written() | {s for job in self.jobs + self.stale for s in job.slots}

    def check(self) -> None:
        """Every hit has its own slot, which nobody writes, and rows being loaded do not change."""
        rows = [self.vllm.pool.lookup(key) for prompt in PROMPTS for key in chunks(prompt, LENGTH)]
        slots = [row.slot for row in rows if row is not None]
        assert len(set(slots)) == len(slots)
        assert self.written().isdisjoint(slots)
        for job in self.jobs:
            if not job.is_store:
                rows = [self.vllm.pool.lookup(key) for key in job.keys]
                assert [row.slot for row in rows if row is not None] == job.slots

    def end(self) -> None:
        """All jobs, fetches and requests end, and nothing is left."""
        while self.jobs:
            self.complete()
        for fetch in self.pending():
            self.vllm.tier.end(fetch, 1)
        self.drain_fetches()
        while self.unfinished:
            self.finish()
        self.vllm.fill(chunks("last", 1))  # a job that begins after every reset
        self.vllm.end_step()
        assert_nothing_left(self.vllm)


@settings(max_examples=100)
@given(st.data())
def test_the_pool_stays_in_order(data: st.DataObject) -> None:
    walk = Walk(data.draw)
    for _ in range(STEPS):
        walk.go_on()
        walk.check()
    walk.end()
