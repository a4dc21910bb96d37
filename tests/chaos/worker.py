"""The worker of a replica: copies between rows and a simulated KV cache, on its own thread.

Jobs run in the order of submission, like those of `engine/worker_side.py`. A load compares every
byte with the expected one and logs the wrong ones at once, so that they count even if the replica
is killed.
"""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.base import OffloadKey

from tests.chaos.workload import row_content
from tests.engine.scheduling import Request
from xinference_xavier.pool.region import Region


@dataclass
class Job:
    """`seconds` is its duration."""

    request: Request
    is_store: bool
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    weights: str
    seconds: float = 0.0


class Worker:
    def __init__(self, region: Region, log: Path) -> None:
        self._region = region
        self._log = log
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.finished: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.wrong_bytes = 0
        threading.Thread(target=self._run, name="chaos-worker", daemon=True).start()

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
        half = self._region.row_bytes // 2
        for part in (slice(None, half), slice(half, None)):
            for key, slot in zip(job.keys, job.slots, strict=True):
                row = self._region.row(slot)
                row[part] = row_content(key, job.weights)[part]
            threading.Event().wait(job.seconds / 2)

    def _load(self, job: Job) -> None:
        threading.Event().wait(job.seconds)
        for key, slot in zip(job.keys, job.slots, strict=True):
            cached = self._region.row(slot).copy()
            wrong = int(np.count_nonzero(cached != row_content(key, job.weights)))
            if wrong:
                self.wrong_bytes += wrong
                with self._log.open("a") as log:
                    log.write(f"{job.request.req_id}: {wrong} bytes of {key.hex()[:12]}\n")
