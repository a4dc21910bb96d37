"""Copies between the CPU platform's KV cache and the rows of the region.

vLLM has a worker for CUDA and XPU, which copies on streams, but none for the CPU platform.

Threading: vLLM's worker thread submits, polls and waits. A thread of ours runs the jobs in order of
submission and divides each one's blocks among the copy threads.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from xinference_xavier.pool.copy_threads import COPY_THREADS, copy_threads
from xinference_xavier.pool.region import Region

logger = logging.getLogger(__name__)


class _Page(NamedTuple):
    """One layer's part of a block, in the KV cache and in a row. All in bytes."""

    cache: npt.NDArray[np.int8]  # shape (blocks, page bytes)
    size: int
    offset: int  # of the chunk's first block in the row
    stride: int  # between two blocks of the chunk


class _Placement(NamedTuple):
    """One block: the pages of its group, its number, its row's slot, its place in the chunk."""

    group: list[_Page]
    block: int
    slot: int
    place: int


class _Job(NamedTuple):
    job_id: int
    is_store: bool
    blocks: GPULoadStoreSpec
    slots: npt.NDArray[np.int32]


class HostWorker(OffloadingWorker):
    """`cell_offset` is the byte in each row at which this worker's cell begins."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: Region, blocks_per_chunk: int, cell_offset: int
    ) -> None:
        self._rows = region.array.view(np.int8)
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = _lay_out(kv_caches, blocks_per_chunk, cell_offset)
        self._runner = ThreadPoolExecutor(1, "xavier-jobs")
        self._copy_threads = copy_threads()
        self._jobs: dict[int, Future[TransferResult]] = {}  # not reported yet, in order

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, True, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return self._submit(job_id, False, dst_spec, src_spec)

    def _submit(
        self, job_id: int, is_store: bool, blocks: GPULoadStoreSpec, rows: LoadStoreSpec
    ) -> bool:
        assert isinstance(rows, BlockIDsLoadStoreSpec)
        job = _Job(job_id, is_store, blocks, rows.block_ids)
        self._jobs[job_id] = self._runner.submit(self._run, job)
        return True

    def get_finished(self) -> list[TransferResult]:
        if not self._jobs:
            return []
        finished = [job.result() for job in takewhile(Future.done, self._jobs.values())]
        for result in finished:
            del self._jobs[result.job_id]
        return finished

    def await_finished(self, seconds: float) -> bool:
        """Wait until the oldest job, if any, is done. False if that takes longer."""
        oldest = [*self._jobs.values()][:1]
        return not wait(oldest, seconds).not_done

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs are done, because vLLM is about to reuse their blocks."""
        wait([self._jobs[job_id] for job_id in job_ids & self._jobs.keys()])

    def shutdown(self) -> None:
        self._runner.shutdown()
        self._copy_threads.shutdown()

    def _run(self, job: _Job) -> TransferResult:
        began = time.perf_counter()
        try:
            size = self._copy(job)
        except Exception:  # vLLM ends the engine on a failed job, and hangs on an unreported one
            logger.exception("copy job failed: job_id=%d", job.job_id)
            return TransferResult(job.job_id, False)
        return TransferResult(job.job_id, True, size, time.perf_counter() - began)

    def _copy(self, job: _Job) -> int:
        """Copy every page of the job. Returns the number of bytes."""
        placements = iter([*self._placements(job)])  # free threads take the next one
        copying = [
            self._copy_threads.submit(self._copy_blocks, job.is_store, placements)
            for _ in range(COPY_THREADS)
        ]
        wait(copying)
        return sum(copied.result() for copied in copying)

    def _copy_blocks(self, is_store: bool, placements: Iterator[_Placement]) -> int:
        copied = 0
        for group, block, slot, place in placements:
            row = self._rows[slot]
            for page in group:
                start = page.offset + place * page.stride
                in_row = row[start : start + page.size]
                in_cache = page.cache[block, : page.size]
                if is_store:
                    in_row[:] = in_cache
                else:
                    in_cache[:] = in_row
                copied += page.size
        return copied

    def _placements(self, job: _Job) -> Iterator[_Placement]:
        """One for each block. A group's first block may begin inside a chunk, and its last chunk
        may be cut short."""
        blocks = job.blocks.block_ids.tolist()
        slots = job.slots.tolist()
        first_block = first_slot = 0
        sizes_and_starts = zip(job.blocks.group_sizes, job.blocks.block_indices, strict=True)
        for group, (size, start) in zip(self._groups, sizes_and_starts, strict=True):
            if size == 0:
                continue
            skipped = start % self._blocks_per_chunk
            for i in range(size):
                chunk, place = divmod(skipped + i, self._blocks_per_chunk)
                number, slot = blocks[first_block + i], slots[first_slot + chunk]
                yield _Placement(group, number, slot, place)
            first_block += size
            first_slot += chunk + 1


def _lay_out(
    kv_caches: CanonicalKVCaches, blocks_per_chunk: int, cell_offset: int
) -> list[list[_Page]]:
    """The pages of each KV-cache group. A cell holds tensor after tensor, each block by block."""
    offsets = []
    offset = cell_offset
    for tensor in kv_caches.tensors:
        offsets.append(offset)
        offset += tensor.page_size_bytes * blocks_per_chunk
    groups = []
    for refs in kv_caches.group_data_refs:
        pages = []
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx]
            cache = tensor.tensor.view(-1, tensor.page_size_bytes).numpy()
            pages.append(
                _Page(cache, ref.page_size_bytes, offsets[ref.tensor_idx], tensor.page_size_bytes)
            )
        groups.append(pages)
    return groups
