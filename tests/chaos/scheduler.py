"""vLLM's scheduler above a manager: a constant load.

Threading: `Scheduler` is a thread, the replica's scheduler thread. Other threads hand it actions
with `call` and read its figures.
"""

import queue
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, OffloadKey

from tests.chaos.worker import Job, Worker
from tests.chaos.workload import prompt
from tests.engine.scheduling import (
    CHUNK,
    FACTS,
    Request,
    Scheduling,
    chunks,
    without_requests,
)
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.protocol.prefixes import prefix_of
from xinference_xavier.replica.fetcher import FetchState
from xinference_xavier.replica.kept_prefixes import ComputedPrefix
from xinference_xavier.replica.peer_tier import PeerTier

STEP = 0.015
"""Seconds per step of the engine, in place of computing."""
MAX_REQUESTS = 4
"""Concurrent requests."""
MIN_FETCH_CHUNKS = 2
PREFILL_RATE = 1024.0
"""Tokens per second that the manager believes: eight chunks and more are worth waiting for."""


class Phase(Enum):
    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()


@dataclass
class _Served:
    """A request and its phase. `pending_since` is the time of its first RETRY, `waited` the seconds
    that the scheduler had waited until then."""

    request: Request
    own_prefix: int
    phase: Phase = Phase.WAITING
    hits: int = 0
    steps: int = 0
    is_pending: bool = False
    pending_since: float | None = None
    waited: float = 0.0


@dataclass
class Figures:
    """`decisions` are those that took longer than the deadline: (first pending lookup, decision,
    seconds between the two that were spent between steps and in lookups). The rest of the time, the
    engine computed for other requests or got no processor."""

    requests: int = 0
    finished: int = 0
    operations: int = 0
    longest_scheduling_wait: float = 0.0
    decisions: list[tuple[float, float, float]] = field(default_factory=list)


class _Live(Scheduling):
    """vLLM's order of calls, on a manager with a real replica."""

    def __init__(self, tier: PeerTier, fetch_timeout: float) -> None:
        self.pool = tier.pool
        self.manager = XavierManager(
            replace(
                FACTS,
                row_bytes=1,
                min_fetch_tokens=MIN_FETCH_CHUNKS * CHUNK,
                fetch_timeout=fetch_timeout,
            ),
            tier.pool,
            tier,
            partial(without_requests, tier.pool),
        )
        self.manager.prefill_rate.tokens_per_second = PREFILL_RATE


class Scheduler(threading.Thread):
    def __init__(
        self,
        name: str,
        *,
        tier: PeerTier,
        grants: Callable[[], int],
        worker: Worker,
        fetch_timeout: float,
        weights: str,
        seed: int,
        log: Path,
        report: Callable[[], None],
    ) -> None:
        super().__init__(name="chaos-scheduler", daemon=True)
        self._prefix = name
        self._vllm = _Live(tier, fetch_timeout)
        self._pool = tier.pool
        self._grants = grants
        self._worker = worker
        self._fetch_timeout = fetch_timeout
        self._source = random.Random(seed)
        self._log = log
        self._report = report
        self._arrived: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._actions: list[Callable[[], bool]] = []
        self._served: list[_Served] = []
        self._jobs: list[Job] = []
        self._flushes = 0
        self._waited = 0.0  # seconds: the planned pauses between steps, and all lookups
        self.weights = weights
        self.named: deque[ComputedPrefix] = deque()
        self.computed: deque[str] = deque(maxlen=100)
        """Requests that computed a named prefix, the latest last."""
        self.paused = True
        self.died = False
        self.figures = Figures()

    @property
    def manager(self) -> XavierManager:
        return self._vllm.manager

    @property
    def in_flight(self) -> int:
        return len(self._served)

    def call(self, action: Callable[[], Any]) -> Any:
        """Run `action` between two steps; return its result."""
        return self.call_when(lambda: True, action, 10.0)

    def call_when(
        self, condition: Callable[[], bool], action: Callable[[], Any], timeout: float
    ) -> Any:
        """Run `action` after the first step that leaves `condition` true; return its result, or
        None if there is no such step in time."""
        future: Future[Any] = Future()
        until = time.monotonic() + timeout

        def attempt() -> bool:
            if condition():
                future.set_result(action())
            elif time.monotonic() > until:
                future.set_result(None)
            return future.done()

        self._arrived.put(attempt)
        return future.result(timeout + 10.0)

    def run(self) -> None:
        next_report = 0.0
        try:
            while True:
                began = time.monotonic()
                self._step()
                if began > next_report:
                    next_report = began + 0.1
                    self._report()
                pause = max(0.001, STEP - (time.monotonic() - began))
                threading.Event().wait(pause)
                self._waited += pause
        except BaseException:  # here vLLM's engine would die, with all its requests
            self.died = True
            with self._log.open("a") as log:
                log.write(traceback.format_exc())
            self._report()
            raise

    # -- a step -------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self.paused and len(self._served) < MAX_REQUESTS:
            self._admit()
        for served in list(self._served):
            if served.phase is Phase.WAITING:
                self._attempt(served)
        for served in list(self._served):
            if served.phase is Phase.RUNNING:
                self._compute(served)
        self._vllm.end_step()
        self._collect()
        while not self._arrived.empty():
            self._actions.append(self._arrived.get())
        self._actions = [attempt for attempt in self._actions if not attempt()]

    def _admit(self) -> None:
        self.figures.requests += 1
        keys = prompt(self._source)
        request = self._vllm.arrive(f"{self._prefix}-{self.figures.requests}", keys)
        own_prefix = self._source.choice((0, 0, 0, 1, 2))
        self._served.append(_Served(request, own_prefix))

    def compute(self, name: str, keys: Sequence[OffloadKey]) -> None:
        """A request that computes a named prefix."""
        self.figures.requests += 1
        self._served.append(_Served(self._vllm.arrive(name, keys), 0))

    def _attempt(self, served: _Served) -> None:
        self.figures.operations += 1
        began = time.monotonic()
        hits = self._vllm.scan(served.request, served.own_prefix)
        now = time.monotonic()
        self._waited += now - began
        if hits is None:
            served.is_pending = True
            if served.pending_since is None:
                served.pending_since, served.waited = now, self._waited
            return
        if served.is_pending and served.pending_since is not None:
            served.is_pending = False
            self._note_decision(served.pending_since, now, self._waited - served.waited)
        slots = self._vllm.schedule(served.request, hits, served.own_prefix)
        served.hits, served.steps = hits, self._source.randint(1, 3)
        served.phase = Phase.LOADING if hits else Phase.RUNNING
        if (prefix := prefix_of(served.request.req_id)) is not None:
            own = tuple(served.request.keys)
            self.named.append(ComputedPrefix(prefix, CHUNK * len(own), own))
        if hits:
            keys = served.request.keys[served.own_prefix :][:hits]
            self._submit(Job(served.request, False, keys, slots, self.weights, self._haste()))

    def _note_decision(self, since: float, now: float, waited: float) -> None:
        if now - since > self._fetch_timeout:
            self.figures.decisions.append((since, now, waited))
        else:
            self.figures.longest_scheduling_wait = max(
                self.figures.longest_scheduling_wait, now - since
            )

    def _compute(self, served: _Served) -> None:
        served.steps -= 1
        if served.steps > 0:
            return
        request = served.request
        computed = request.keys[served.own_prefix + served.hits :]
        self._store(request, computed)
        self.figures.finished += 1
        if prefix_of(request.req_id) is not None:
            self.computed.append(request.req_id)
        self._finish(served)

    def _store(self, request: Request, keys: Sequence[OffloadKey]) -> None:
        output = self.manager.prepare_store(keys, request.context)
        assert output is not None
        assert isinstance(output.store_spec, BlockIDsLoadStoreSpec)
        if output.keys_to_store:
            self._submit(
                Job(
                    request,
                    True,
                    output.keys_to_store,
                    output.store_spec.block_ids.tolist(),
                    self.weights,
                    self._haste(),
                )
            )

    def _haste(self) -> float:
        """A job's duration in seconds, mostly zero."""
        return self._source.choice((0.0, 0.0, 0.0, 0.002, 0.02))

    def _submit(self, job: Job) -> None:
        self.figures.operations += 1
        self._jobs.append(job)
        self._worker.submit(job)

    def _finish(self, served: _Served) -> None:
        self._served.remove(served)
        self._vllm.finish(served.request)

    def _collect(self) -> None:
        while not self._worker.finished.empty():
            job = self._worker.finished.get()
            if not any(job is known for known in self._jobs):
                continue  # from before a reset: vLLM does not report it
            self._jobs = [known for known in self._jobs if known is not job]
            if job.is_store:
                context = job.request.context
                self.manager.complete_store(set(job.keys), context, success=True)
                continue
            self.manager.complete_load(set(job.keys), job.request.context)
            for served in self._served:
                if served.request is job.request:
                    served.phase = Phase.RUNNING

    # -- actions ------------------------------------------------------------------------------

    def reset(self, weights: str) -> None:
        """Change the engine's weights, which voids everything computed before."""
        self.weights = weights
        self._jobs = []
        for served in self._served:
            served.phase = Phase.WAITING
        self.manager.reset_cache()

    def is_fetching(self) -> bool:
        return any(fetch.state is FetchState.PENDING for fetch in self.manager.fetches)

    def is_serving(self) -> bool:
        return self._grants() > 0

    def is_idle(self) -> bool:
        return not self._served and not self._jobs and not self.manager.has_pending_work()

    def flush(self) -> None:
        """Compute, store and publish a last chunk."""
        self._flushes += 1
        name = f"flush {self._prefix}, {self._flushes}"
        request = self._vllm.arrive(name, chunks(name, 1))
        self._store(request, list(request.keys))
        self._vllm.finish(request)
