"""vLLM's worker for CUDA and XPU, over our region in the shape that it expects of its own.

`CPUOffloadingWorker` registers the memory with the driver and carves its tensors out of it.
"""

from collections.abc import Iterator, Sequence

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from xinference_xavier.engine.compat import host_unregister
from xinference_xavier.pool.region import ROW_ALIGNMENT, Region


class DeviceRegion:
    """The view of one worker, whose cell follows those of lower ranks in each row.

    `cells` has the bytes of each cell.
    """

    page_size = ROW_ALIGNMENT

    def __init__(self, region: Region, rank: int, cells: Sequence[int]) -> None:
        self.rank = rank
        self.num_chunks = region.rows
        self.total_size_bytes = region.size
        self.cpu_page_size = cells[rank]
        self.is_pinned = False
        self.pinned_addresses: list[int] = []
        self._row_stride = region.row_bytes
        self._region = region
        self._base: torch.Tensor | None = torch.from_numpy(region.array.reshape(-1)).view(
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
        for row in range(self.num_chunks):
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
        self._region.close()


def device_worker(
    kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: DeviceRegion
) -> CPUOffloadingWorker:
    return CPUOffloadingWorker(
        kv_caches=kv_caches,
        blocks_per_chunk=blocks_per_chunk,
        num_cpu_chunks=region.num_chunks,
        mmap_region=region,  # type: ignore[arg-type]  # has what it reads of vLLM's own
    )
