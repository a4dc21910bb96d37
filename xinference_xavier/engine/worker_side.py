"""Our side of the connector in vLLM's workers, and the copies between a KV cache and the region.

vLLM has a worker for CUDA and XPU, which copies on streams (`device_worker`), but none for the CPU
platform (`HostWorker`).

Threading: vLLM's worker thread calls everything here. For `HostWorker` a thread of ours runs the
jobs in order of submission and divides each one's blocks among the copy threads.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from xinference_xavier.engine.compat import host_register, host_unregister
from xinference_xavier.errors import RegionError
from xinference_xavier.pool.region import COPY_THREADS, ROW_ALIGNMENT, Memory, copy_threads
from xinference_xavier.pool.window import Window

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

logger = logging.getLogger(__name__)

_PINNED_AT_ONCE = 1 << 30  # bytes; drivers have limits, and copies wait for a call to end

# -- our side of the connector --------------------------------------------------------------------


class WorkerSide(OffloadingConnector):
    """The worker's half of the connector. vLLM asks it several times in each step, and in each
    layer. In most steps no job runs, and vLLM's own methods take their time to find that out: 1.3 %
    of a step with 4 requests, 0.6 % with 32 (a model of 26 million parameters; 12 loads of 115
    steps, in turns with and without)."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        # Not the one of `OffloadingConnector`: see `engine.connector`.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_scheduler: OffloadingConnectorScheduler | None = None
        self.connector_worker: OffloadingConnectorWorker | None = None
        self._jobs = set[int]()  # that this worker has not reported as completed

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls this at the beginning of each step, before it removes or submits a job."""
        assert isinstance(kv_connector_metadata, OffloadingConnectorMetadata)
        self._jobs.update(kv_connector_metadata.load_jobs, kv_connector_metadata.store_jobs)
        if self._jobs:
            super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self._jobs:
            super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        if not self._jobs:
            return set(), set()
        return super().get_finished(finished_req_ids)

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        if not self._jobs:
            return None
        completed = super().build_connector_worker_meta()
        if completed is not None:
            self._jobs.difference_update(completed.completed_jobs)
        return completed

    def has_connector_metadata(self) -> bool:
        """vLLM asks in each layer: there is nothing to load or to save for a layer alone."""
        return False


# -- the CPU platform -----------------------------------------------------------------------------


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
        self, kv_caches: CanonicalKVCaches, rows: Memory, blocks_per_chunk: int, cell_offset: int
    ) -> None:
        self._rows = rows.view(np.int8)
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
    """The pages of each KV-cache group."""
    offsets = tensor_offsets(kv_caches, blocks_per_chunk)
    groups = []
    for refs in kv_caches.group_data_refs:
        pages = []
        for ref in refs:
            tensor = kv_caches.tensors[ref.tensor_idx]
            cache = tensor.tensor.view(-1, tensor.page_size_bytes).numpy()
            offset = cell_offset + offsets[ref.tensor_idx]
            pages.append(_Page(cache, ref.page_size_bytes, offset, tensor.page_size_bytes))
        groups.append(pages)
    return groups


def tensor_offsets(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> list[int]:
    """The byte in a cell at which each tensor begins. They follow each other, each block by
    block."""
    sizes = (tensor.page_size_bytes * blocks_per_chunk for tensor in kv_caches.tensors)
    return [*accumulate(sizes, initial=0)]


# -- CUDA and XPU ---------------------------------------------------------------------------------


class DeviceRegion:
    """The view of one worker, whose cell follows those of lower ranks in each row.

    `cells` has the bytes of each cell.
    """

    page_size = ROW_ALIGNMENT

    def __init__(self, window: Window, rank: int, cells: Sequence[int]) -> None:
        self.rank = rank
        self.num_chunks = window.rows
        self.total_size_bytes = window.own.size  # what vLLM pins
        self.cpu_page_size = cells[rank]
        self.is_pinned = False
        self.pinned_addresses: list[int] = []
        self._row_stride = window.row_bytes
        self._own = window.own
        self._base: torch.Tensor | None = torch.from_numpy(window.array.reshape(-1)).view(
            torch.int8
        )
        self._start = self._next_offset = sum(cells[:rank])

    @property
    def base_tensor(self) -> torch.Tensor:
        assert self._base is not None, "the region was cleaned up"
        return self._base

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next tensor's part of this worker's cells: int8, shape (rows, tensor_page_size)."""
        view = torch.as_strided(
            self.base_tensor,
            size=(self.num_chunks, tensor_page_size),
            stride=(self._row_stride, 1),
            storage_offset=self._next_offset,
        )
        self._next_offset += tensor_page_size
        assert self._next_offset <= self._start + self.cpu_page_size
        return view

    def iter_worker_slot_ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, length) in bytes of the whole pages around each of this worker's cells.

        vLLM 0.33 registers these instead of the region where that saves enough.
        """
        for row in range(self._own.rows):
            start = row * self._row_stride + self._start
            first = start - start % self.page_size
            end = -(-(start + self.cpu_page_size) // self.page_size) * self.page_size
            yield first, end - first

    def cleanup(self) -> None:
        if self.is_pinned and self._base is not None:
            for address in reversed(self.pinned_addresses or [self._base.data_ptr()]):
                host_unregister(address)
            self.pinned_addresses.clear()
            self.is_pinned = False
        self._base = None
        self._own.close()


class DevicePinning:
    """Has the device's driver pin neighbours' rows, on the thread that maps them. A mapping that
    cannot be written can be pinned on few systems only, so it is one that nobody writes to."""

    def __init__(self) -> None:
        self._device = torch.accelerator.current_device_index()
        self._pinned: dict[int, list[int]] = {}  # by the first address

    def pin(self, rows: Memory) -> None:
        torch.accelerator.set_device_index(self._device)
        pinned = self._pinned[rows.ctypes.data] = []
        at_once = max(1, _PINNED_AT_ONCE // rows.shape[1])
        for first in range(0, len(rows), at_once):
            part = rows[first : first + at_once]
            if not host_register(part.ctypes.data, part.nbytes):
                self.unpin(rows)
                raise RegionError("the device's driver refuses to pin it")
            pinned.append(part.ctypes.data)

    def unpin(self, rows: Memory) -> None:
        for address in reversed(self._pinned.pop(rows.ctypes.data, [])):
            host_unregister(address)


def device_worker(
    kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: DeviceRegion
) -> CPUOffloadingWorker:
    return CPUOffloadingWorker(
        kv_caches=kv_caches,
        blocks_per_chunk=blocks_per_chunk,
        num_cpu_chunks=region.num_chunks,
        mmap_region=region,  # type: ignore[arg-type]  # has what it reads of vLLM's own
    )
