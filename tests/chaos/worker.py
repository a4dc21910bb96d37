"""The worker of a replica: copies between rows and a simulated KV cache, on its own thread.

Jobs run in the order of submission, like those of `engine/worker_side.py`. A load compares every
byte with the expected one and logs the wrong ones at once, so that they count even if the replica
is killed.
"""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey

from tests.chaos.workload import row_content
from tests.engine.scheduling import Request
from xinference_xavier.pool.region import Memory


@dataclass
class Job:
    """`seconds` is its duration."""

    request: Request
    is_store: bool
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    weights: str
    seconds: float = 0.0


@dataclass
class Halt:
    """`begun` is set once the worker stands still because of it, before it loads the slots
    `loading`."""

    at: frozenset[int]
    loading: frozenset[int] = frozenset()
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


class Worker:
    """`rows` are the own ones, and behind them those that neighbours lend."""

    def __init__(self, rows: Memory, log: Path) -> None:
        self._rows = rows
        self._log = log
        self._lock = threading.Lock()
        self._halt: Halt | None = None
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.finished: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.wrong_bytes = 0
        threading.Thread(target=self._run, name="chaos-worker", daemon=True).start()

    def halt(self, at: frozenset[int]) -> Halt | None:
        """Stand still before the next load of rows of these slots. None if somebody else waits for
        that."""
        with self._lock:
            if self._halt is not None:
                return None
            self._halt = Halt(at)
            return self._halt

    def go_on(self, halt: Halt) -> None:
        with self._lock:
            self._halt = None
        halt.over.set()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job.is_store:
                self._store(job)
            else:
                self._load(job)
            self.finished.put(job)

    def _store(self, job: Job) -> None:
        """Write in two halves, so that a row is half written for a while."""
        half = self._rows.shape[1] // 2
        for part in (slice(None, half), slice(half, None)):
            for key, slot in zip(job.keys, job.slots, strict=True):
                row = self._rows[slot]
                row[part] = row_content(key, job.weights)[part]
            threading.Event().wait(job.seconds / 2)

    def _load(self, job: Job) -> None:
        threading.Event().wait(job.seconds)
        halt = self._halt
        if halt is not None and not halt.at.isdisjoint(job.slots):
            halt.loading = frozenset(job.slots)
            halt.begun.set()
            halt.over.wait()
        for key, slot in zip(job.keys, job.slots, strict=True):
            cached = self._rows[slot].copy()
            wrong = int(np.count_nonzero(cached != row_content(key, job.weights)))
            if wrong:
                self.wrong_bytes += wrong
                with self._log.open("a") as log:
                    log.write(f"{job.request.req_id}: {wrong} bytes of {key.hex()[:12]}\n")
