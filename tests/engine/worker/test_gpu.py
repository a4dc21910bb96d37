"""vLLM's worker for devices gets a view with the same layout as `HostWorker`'s rows."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.engine.caches import cell_bytes, kv_caches, pages_of
from xinference_xavier.engine.worker import DeviceRegion, HostWorker
from xinference_xavier.pool.region import ROW_ALIGNMENT, Region

ROWS = 4
BLOCKS_PER_CHUNK = 2
WORKERS = 3
SLOT = 2


@pytest.fixture
def caches() -> CanonicalKVCaches:
    return kv_caches([[640, 400], [320]])


@pytest.fixture
def region(caches: CanonicalKVCaches) -> Region:
    cells = WORKERS * cell_bytes(caches, BLOCKS_PER_CHUNK)
    return Region.create(ROWS, -(-cells // ROW_ALIGNMENT) * ROW_ALIGNMENT)


def views(region: Region, rank: int, caches: CanonicalKVCaches) -> list[bytes]:
    """The row as a device worker of this rank sees it, tensor by tensor."""
    device = DeviceRegion(region, rank, [cell_bytes(caches, BLOCKS_PER_CHUNK)] * WORKERS)
    sizes = [tensor.page_size_bytes * BLOCKS_PER_CHUNK for tensor in caches.tensors]
    return [device.create_next_worker_view(size)[SLOT].numpy().tobytes() for size in sizes]


@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_row_written_by_the_cpu_worker_is_read_through_the_view(
    rank: int, region: Region, caches: CanonicalKVCaches
) -> None:
    cell = cell_bytes(caches, BLOCKS_PER_CHUNK)
    working = HostWorker(caches, region, BLOCKS_PER_CHUNK, rank * cell)
    gpu = GPULoadStoreSpec([7, 3, 1, 8], group_sizes=[2, 2], block_indices=[0, 0])
    working.submit_store(1, gpu, CPULoadStoreSpec([SLOT, SLOT]))
    working.shutdown()
    (a7, b7), (a3, b3) = pages_of(caches, 0, 7), pages_of(caches, 0, 3)
    (c1,), (c8,) = pages_of(caches, 1, 1), pages_of(caches, 1, 8)
    assert views(region, rank, caches) == [a7 + a3, b7 + b3, c1 + c8]


@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_row_written_through_the_view_is_loaded_by_the_cpu_worker(
    rank: int, region: Region, caches: CanonicalKVCaches
) -> None:
    cell = cell_bytes(caches, BLOCKS_PER_CHUNK)
    device = DeviceRegion(region, rank, [cell] * WORKERS)
    for tensor in caches.tensors:
        view = device.create_next_worker_view(tensor.page_size_bytes * BLOCKS_PER_CHUNK)
        view[SLOT] = tensor.tensor[4:6].reshape(-1)
    expected = [pages_of(caches, 0, block) for block in (4, 5)]
    working = HostWorker(caches, region, BLOCKS_PER_CHUNK, rank * cell)
    gpu = GPULoadStoreSpec([20, 21], group_sizes=[2, 0], block_indices=[0, 0])
    working.submit_load(1, CPULoadStoreSpec([SLOT]), gpu)
    working.shutdown()
    assert [pages_of(caches, 0, block) for block in (20, 21)] == expected


def test_a_view_covers_every_row(region: Region, caches: CanonicalKVCaches) -> None:
    view = DeviceRegion(region, 1, [2720, 1280]).create_next_worker_view(1280)
    assert view.shape == (ROWS, 1280)
    assert view.stride() == (region.row_bytes, 1)
    view.fill_(1)
    assert (region.array[:, 2720:4000] == 1).all()
    assert int(region.array.sum()) == ROWS * 1280


def test_a_worker_gets_no_more_than_its_cell(region: Region) -> None:
    device = DeviceRegion(region, 0, [1000])
    device.create_next_worker_view(1000)
    with pytest.raises(AssertionError):
        device.create_next_worker_view(1)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("cells", [[2720] * 3, [2720, 4080, 1360]], ids=["equal", "unequal"])
def test_the_ranges_to_register_are_whole_pages_around_the_cells(
    rank: int, cells: list[int], region: Region
) -> None:
    ranges = list(DeviceRegion(region, rank, cells).iter_worker_slot_ranges())
    assert len(ranges) == ROWS
    for row, (offset, length) in enumerate(ranges):
        start = row * region.row_bytes + sum(cells[:rank])
        assert offset % ROW_ALIGNMENT == length % ROW_ALIGNMENT == 0
        assert offset <= start < offset + ROW_ALIGNMENT
        end = start + cells[rank]
        assert end <= offset + length < end + ROW_ALIGNMENT
        assert offset + length <= region.size


def test_cleaning_up_twice_is_harmless(region: Region) -> None:
    device = DeviceRegion(region, 0, [1000])
    device.cleanup()
    device.cleanup()
    assert region.fd == -1
