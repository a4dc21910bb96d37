"""vLLM's worker in the simulation: it computes and copies on real bytes, and checks what it reads.

`ModelRunner` does in each step what vLLM's model runners do, in their order: it takes the step's
blocks, reads what the tokens attend to, writes what they add, and calls our connector. `CopyJobs`
is our worker for the CPU platform, except that its jobs run when the simulation says so.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.engine.vllm_scheduler import output_of, starts_of
from tests.simulation.contents import BLOCK_TOKENS, LAYERS, Layout, Numbers, Text, ages
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.worker import HostWorker
from xinference_xavier.pool.region import Region

_NO_CONTEXT: Any = None
"""Our connector reads nothing of vLLM's forward context."""
_Places = npt.NDArray[np.int64]


class WrongBytesError(AssertionError):
    """Somebody read what he must not read."""


class _AtOnce:
    """In place of the copy threads."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self) -> None:
        pass


class _Queue:
    """In place of the thread that runs jobs: holds them until `run_one`."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Future[Any], Callable[..., Any], Any]] = deque()

    def submit(self, function: Callable[..., Any], job: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, function, job))
        return future

    def run_one(self) -> bool:
        """Run the oldest job. False if there is none."""
        if not self._jobs:
            return False
        future, function, job = self._jobs.popleft()
        future.set_result(function(job))
        return True

    def shutdown(self) -> None:
        while self.run_one():
            pass


class CopyJobs(HostWorker):
    """`run_one` runs the oldest job; so does whoever waits for one that has not run."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: Region, blocks_per_chunk: int) -> None:
        super().__init__(kv_caches, region, blocks_per_chunk, 0)
        self._copy_threads.shutdown()
        self._runner.shutdown()
        self._copy_threads = _AtOnce()  # type: ignore[assignment]
        self._queue = _Queue()
        self._runner = self._queue  # type: ignore[assignment]

    def run_one(self) -> bool:
        return self._queue.run_one()

    def wait(self, job_ids: set[int]) -> None:
        while not all(self._jobs[job].done() for job in job_ids & self._jobs.keys()):
            self.run_one()

    def await_finished(self, seconds: float) -> bool:  # nothing waits here
        self.run_one()
        return all(job.done() for job in [*self._jobs.values()][:1])

    @property
    def is_at_rest(self) -> bool:
        return not self._jobs


class _Running:
    """A request in the worker: its block tables, and the age of what it has read."""

    def __init__(self, text: Text, blocks: Sequence[Sequence[int]], age: int) -> None:
        self.text = text
        self.tables = [list(table) for table in blocks]
        self.age = age


class ModelRunner:
    """`texts` are those of all requests, by id.

    What a request finds in the cache when it starts, or starts again, must not be older than the
    weights that `oldest_allowed()` names.
    """

    def __init__(
        self,
        layout: Layout,
        connector: XavierConnector,
        texts: dict[str, Text],
        *,
        weights: Callable[[], int],
        oldest_allowed: Callable[[], int],
    ) -> None:
        self._groups = layout.groups
        self._connector = connector
        self._texts = texts
        self._weights = weights
        self._oldest_allowed = oldest_allowed
        self._running: dict[str, _Running] = {}
        self.reads = 0
        tensors = [
            torch.zeros((layout.blocks, 2 * BLOCK_TOKENS), dtype=torch.float32)
            for _ in range(LAYERS)
        ]
        self.kv_caches: dict[str, torch.Tensor] = {}
        for group in layout.groups:
            for name, tensor in zip(group.names, tensors, strict=True):
                shape = (layout.blocks, 2, BLOCK_TOKENS, 1, 1)
                self.kv_caches[name] = tensor if group.is_recurrent else tensor.view(shape)
        caches = [tensor.numpy().view(np.uint64) for tensor in tensors]
        self._caches: list[Numbers] = caches  # by layer, of shape (blocks, tokens)

    def execute(self, step: SchedulerOutput, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
        """Compute the step, whose requests then answer the tokens `sampled`."""
        connector, metadata = self._connector, step.kv_connector_metadata
        assert isinstance(metadata, OffloadingConnectorMetadata)
        connector.handle_preemptions(metadata)
        self._take_blocks(step)
        connector.bind_connector_metadata(metadata)
        for span in self._spans(step):
            self._compute(*span)
        connector.start_load_kv(_NO_CONTEXT)
        connector.wait_for_save()  # type: ignore[no-untyped-call]
        _, loaded = connector.get_finished(step.finished_req_ids)
        output = KVConnectorOutput(
            finished_recving=loaded,
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output_of(sampled, output)

    def _take_blocks(self, step: SchedulerOutput) -> None:
        for req_id in step.finished_req_ids:
            self._running.pop(req_id, None)
        copies = [
            (copy.src_block_id, copy.dst_block_id) for copy in step.kv_cache_block_copies or ()
        ]
        for cache in self._caches:
            for source, target in copies:
                cache[target] = cache[source]
        age = self._weights()
        for new in step.scheduled_new_reqs:
            text = self._texts[new.req_id]
            self._running[new.req_id] = _Running(text, new.block_ids, age)
        cached = step.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                assert blocks is not None
                self._running[req_id] = _Running(self._texts[req_id], blocks, age)
            elif blocks is not None:
                for table, added in zip(self._running[req_id].tables, blocks, strict=True):
                    table += added

    def _spans(self, step: SchedulerOutput) -> Iterator[tuple[str, int, int, bool]]:
        """Each request of the step, its first token, the one behind its last, and whether it
        begins, perhaps once more: then what it attends to comes from a cache, ours or vLLM's."""
        starts = starts_of(step)
        fresh = {new.req_id for new in step.scheduled_new_reqs}
        fresh |= step.scheduled_cached_reqs.resumed_req_ids
        for req_id, count in step.num_scheduled_tokens.items():
            yield req_id, starts[req_id], starts[req_id] + count, req_id in fresh

    # -- what a model does --------------------------------------------------------------------

    def _compute(self, req_id: str, start: int, end: int, begins: bool) -> None:
        running = self._running[req_id]
        for number in range(len(self._groups)):
            running.age = min(running.age, self._read(req_id, number, start))
        if begins and running.age < self._oldest_allowed():
            raise WrongBytesError(
                f"{req_id} begins at token {start} with what weights {running.age} computed, after "
                f"all caches were reset for weights {self._oldest_allowed()}"
            )
        for number, group in enumerate(self._groups):
            first = end - 1 if group.is_recurrent else start
            blocks, places = self._places(running, number, first, end)
            if 0 in blocks:
                raise WrongBytesError(f"{req_id} writes to no block: {running.tables[number]}")
            written = group.numbers(running.text.hashes(first, end), running.age)
            for cache, numbers in zip(self._caches, written, strict=True):
                cache[blocks, places] = numbers

    def _places(
        self, running: _Running, number: int, first: int, last: int
    ) -> tuple[_Places, _Places]:
        """The blocks of these tokens, and the places there. A state is at the beginning of the
        block of its last token."""
        tokens = np.arange(first, last)
        table = np.array(running.tables[number], dtype=np.int64)
        places = tokens % BLOCK_TOKENS * (not self._groups[number].is_recurrent)
        return table[tokens // BLOCK_TOKENS], places

    def _read(self, req_id: str, number: int, start: int) -> int:
        """Read what the tokens from `start` on depend on. Returns the age of the oldest."""
        running, group = self._running[req_id], self._groups[number]
        first = max(0, start - group.reach(start))
        if first == start:
            return self._weights()
        blocks, places = self._places(running, number, first, start)
        found = np.stack([cache[blocks, places] for cache in self._caches])
        self.reads += found.size
        if faults := group.faults(found, running.text.hashes(first, start)):
            where = [(first + fault, int(blocks[fault])) for fault in faults[:8]]
            raise WrongBytesError(
                f"{req_id} reads from {group.names[0]} what is not its own, at (token, block) "
                f"{where}; it attends to tokens {first} to {start - 1}"
            )
        return int(ages(found).min())
