"""vLLM's worker in the simulation: it computes and copies on real bytes, and checks what it reads.

`ModelRunner` does in each step what vLLM's model runners do, in their order: it takes the step's
blocks, reads what the tokens attend to, writes what they add, and calls our connector.
"""

from collections.abc import Callable, Iterator, Sequence
from threading import Semaphore
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    TransferResult,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.engine.vllm_scheduler import output_of, starts_of
from tests.simulation.adapters import AdapterFiles
from tests.simulation.contents import (
    BLOCK_TOKENS,
    LAYERS,
    MIXED,
    Layout,
    Numbers,
    Text,
    ages,
    contents,
)
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.worker_side import HostWorker
from xinference_xavier.pool.region import Memory

_NO_CONTEXT: Any = None
"""Our connector reads nothing of vLLM's forward context."""
_Places = npt.NDArray[np.int64]


class WrongBytesError(AssertionError):
    """Somebody read what he must not read."""


class CopyJobs(HostWorker):
    """Our worker for the CPU platform. Its threads copy beside the scheduler's, but only as many
    blocks as `go_on` has allowed, so that any event can find a job half done. Whoever asks for the
    jobs that are done waits for those of which all blocks are allowed.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, rows: Memory, blocks_per_chunk: int) -> None:
        self._allowing = Semaphore(0)
        self._allowed = self._submitted = 0  # blocks
        self._ends: dict[int, int] = {}  # what `_submitted` was then, by job
        super().__init__(kv_caches, rows, blocks_per_chunk, 0)

    def go_on(self, blocks: int) -> None:
        """Copy so many blocks, unless no job has any left."""
        if (allowed := min(blocks, self._submitted - self._allowed)) > 0:
            self._allowed += allowed
            self._allowing.release(allowed)

    @property
    def is_at_rest(self) -> bool:
        return not self._jobs

    def _submit(
        self, job_id: int, is_store: bool, blocks: GPULoadStoreSpec, rows: LoadStoreSpec
    ) -> bool:
        self._submitted += len(blocks.block_ids)
        self._ends[job_id] = self._submitted
        return super()._submit(job_id, is_store, blocks, rows)

    def _copy_blocks(self, is_store: bool, placements: Iterator[Any]) -> int:
        def allowed() -> Iterator[Any]:
            for placement in placements:
                self._allowing.acquire()
                yield placement

        return super()._copy_blocks(is_store, allowed())

    def get_finished(self) -> list[TransferResult]:
        ended = {job_id for job_id, end in self._ends.items() if end <= self._allowed}
        super().wait(ended)
        finished = super().get_finished()
        for result in finished:
            del self._ends[result.job_id]
        return finished

    def wait(self, job_ids: set[int]) -> None:
        waited = job_ids & self._ends.keys()
        self.go_on(max([self._ends[job_id] for job_id in waited], default=0) - self._allowed)
        super().wait(waited)

    def shutdown(self) -> None:
        self.go_on(self._submitted)
        super().shutdown()


class _Running:
    """A request in the worker: its block tables, and what it has read or been computed with: the
    age, and the contents of adapters."""

    def __init__(self, text: Text, blocks: Sequence[Sequence[int]], age: int) -> None:
        self.text = text
        self.tables = [list(table) for table in blocks]
        self.age = age
        self.contents = set[int]()


class ModelRunner:
    """`texts` and `loras` are those of all requests, by id.

    What a request finds in the cache when it starts, or starts again, must not be older than the
    weights that `oldest_allowed()` names.
    """

    def __init__(
        self,
        layout: Layout,
        connector: XavierConnector,
        texts: dict[str, Text],
        loras: dict[str, LoRARequest],
        files: AdapterFiles,
        *,
        weights: Callable[[], int],
        oldest_allowed: Callable[[], int],
    ) -> None:
        self._groups = layout.groups
        self._connector = connector
        self._texts = texts
        self._loras, self._files = loras, files
        self._adapters: dict[int, int] = {}  # contents by vLLM's numbers
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
        for req_id in step.num_scheduled_tokens:
            if req_id in self._loras:
                self.load_adapter(self._loras[req_id])
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

    def load_adapter(self, request: LoRARequest) -> bool:
        """vLLM does so for each step that an adapter is in."""
        if request.load_inplace or request.lora_int_id not in self._adapters:
            self._adapters[request.lora_int_id] = self._files.read(request)
        return True

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
        running, lora = self._running[req_id], self._loras.get(req_id)
        running.contents.add(0 if lora is None else self._adapters[lora.lora_int_id])
        for number in range(len(self._groups)):
            self._read(req_id, number, start)
        content = MIXED if len(running.contents) > 1 else min(running.contents)
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
            hashes = running.text.hashes(first, end)
            written = group.numbers(hashes, running.age, content)
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

    def _read(self, req_id: str, number: int, start: int) -> None:
        """Read what the tokens from `start` on depend on."""
        running, group = self._running[req_id], self._groups[number]
        first = max(0, start - group.reach(start))
        if first == start:
            running.age = min(running.age, self._weights())
            return
        blocks, places = self._places(running, number, first, start)
        found = np.stack([cache[blocks, places] for cache in self._caches])
        self.reads += found.size
        if faults := group.faults(found, running.text.hashes(first, start)):
            where = [(first + fault, int(blocks[fault])) for fault in faults[:8]]
            raise WrongBytesError(
                f"{req_id} reads from {group.names[0]} what is not its own, at (token, block) "
                f"{where}; it attends to tokens {first} to {start - 1}"
            )
        running.age = min(running.age, int(ages(found).min()))
        running.contents |= contents(found)
