"""Copies between the CPU platform's KV cache and the rows of the region.

vLLM's own worker does this for CUDA and XPU on streams; the CPU platform has none. Here one job
after the other is copied, in the order of their submission, by two threads that share its blocks.
Threading: vLLM's worker thread submits, polls and waits; a thread of ours takes the jobs and gives
their blocks to those that copy; a condition guards what the first two share.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import wait
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

from xinference_xavier.pool.copy_threads import COPIERS, copiers
from xinference_xavier.pool.region import Region

logger = logging.getLogger(__name__)

_SOON = 0.005
"""Seconds within which only an engine that has nothing to compute asks again whether a load is
done."""
_LOOK = 0.01
"""Seconds that it then waits for it. Without, it would ask a thousand times a second, and take
Python's lock from the copying threads a third of the time."""


class _Page(NamedTuple):
    """One layer's part of a block: where it is in the KV cache and in a row (bytes)."""

    cache: npt.NDArray[np.int8]  # (blocks, page bytes)
    size: int
    offset: int  # of the chunk's first block in the row
    stride: int  # from one block of the chunk to the next


class _Placement(NamedTuple):
    """A block: its group's pages, its number, its row, its place in the chunk."""

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
    """`cell_offset` is where this worker's cell begins in each row, in bytes."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, region: Region, blocks_per_chunk: int, cell_offset: int
    ) -> None:
        self._rows = region.array.view(np.int8)
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = _lay_out(kv_caches, blocks_per_chunk, cell_offset)
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._unfinished: set[int] = set()
        self._loads: set[int] = set()  # of these
        self._asked = 0.0  # when `get_finished` returned the last time
        self._finished: list[TransferResult] = []
        self._stopping = False
        self._copiers = copiers()
        self._thread = threading.Thread(target=self._copy_jobs, name="xavier-jobs", daemon=True)
        self._thread.start()

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
        with self._changed:
            self._queue.append(_Job(job_id, is_store, blocks, rows.block_ids))
            self._unfinished.add(job_id)
            if not is_store:
                self._loads.add(job_id)
            self._changed.notify_all()
        return True

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            if self._loads and time.monotonic() < self._asked + _SOON:
                self._changed.wait_for(lambda: bool(self._finished), _LOOK)
            finished, self._finished = self._finished, []
        self._asked = time.monotonic()
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs are done: their blocks are about to be used for something else."""
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished.isdisjoint(job_ids))

    def shutdown(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._copiers.shutdown()

    def _copy_jobs(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._stopping)
                if not self._queue:
                    return
                job = self._queue.popleft()
            result = self._run(job)
            with self._changed:
                self._finished.append(result)
                self._unfinished.discard(job.job_id)
                self._loads.discard(job.job_id)
                self._changed.notify_all()

    def _run(self, job: _Job) -> TransferResult:
        began = time.perf_counter()
        try:
            size = self._copy(job)
        except Exception:  # vLLM ends the engine on a failed job; unreported, it would hang
            logger.exception("job %d failed", job.job_id)
            return TransferResult(job.job_id, False)
        return TransferResult(job.job_id, True, size, time.perf_counter() - began)

    def _copy(self, job: _Job) -> int:
        """Copy every page of the job; returns bytes."""
        placements = iter([*self._placements(job)])  # each thread takes the next one
        copying = [
            self._copiers.submit(self._copy_blocks, job.is_store, placements)
            for _ in range(COPIERS)
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
        """Of each block of the job.

        The first block of a group may begin inside a chunk, and the last chunk may be cut short.
        """
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
    """Per KV-cache group its pages; a cell holds tensor after tensor, each with its blocks."""
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
