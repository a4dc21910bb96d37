"""Blocks that are stored and loaded elsewhere are equal byte for byte, on the CPU and on devices. A
worker is asked only while it has a job, and reports each job once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.engine.caches import cell_bytes, kv_caches, pages_of
from tests.engine.vllm_scheduler import BLOCK_TOKENS, engine_config
from xinference_xavier.engine.connector import XavierConnector
from xinference_xavier.engine.spec import XavierSpec
from xinference_xavier.engine.worker_side import DeviceRegion, HostWorker, _Placement
from xinference_xavier.pool.region import ROW_ALIGNMENT, Region
from xinference_xavier.pool.window import SPAN, Window

ROWS = 8


@contextmanager
def worker(
    caches: CanonicalKVCaches,
    blocks_per_chunk: int,
    *,
    region: Region | None = None,
    cell_offset: int = 0,
) -> Iterator[HostWorker]:
    own = region or Region.create(ROWS, cell_bytes(caches, blocks_per_chunk))
    working = HostWorker(caches, own.array, blocks_per_chunk, cell_offset)
    try:
        yield working
    finally:
        working.shutdown()
        if region is None:
            own.close()


def one_group(blocks: list[int], first: int = 0) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])


def run(
    working: HostWorker, job_id: int, *, store: bool, gpu: GPULoadStoreSpec, slots: list[int]
) -> None:
    if store:
        assert working.submit_store(job_id, gpu, CPULoadStoreSpec(slots))
    else:
        assert working.submit_load(job_id, CPULoadStoreSpec(slots), gpu)
    working.wait({job_id})


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
@pytest.mark.parametrize("padding", [0, 24])
def test_blocks_can_be_loaded_into_other_blocks(blocks_per_chunk: int, padding: int) -> None:
    caches = kv_caches([[64, 40]], padding=padding)
    stored = [5, 0, 7, 3, 11, 2, 6, 1]
    into = [12, 23, 15, 14, 13, 22, 21, 16]
    slots = [6, 1, 3, 0, 7, 2, 5, 4][: 8 // blocks_per_chunk]
    before = [pages_of(caches, 0, block) for block in stored]
    with worker(caches, blocks_per_chunk) as working:
        run(working, 1, store=True, gpu=one_group(stored), slots=slots)
        run(working, 2, store=False, gpu=one_group(into), slots=slots)
    assert [pages_of(caches, 0, block) for block in into] == before


def test_only_the_job_s_blocks_and_rows_change() -> None:
    caches = kv_caches([[64]])
    others = [block for block in range(24) if block not in (4, 5)]
    before = [pages_of(caches, 0, block) for block in others]
    region = Region.create(ROWS, cell_bytes(caches, 2))
    with worker(caches, 2, region=region) as working:
        run(working, 1, store=True, gpu=one_group([0, 1]), slots=[3])
        run(working, 2, store=False, gpu=one_group([4, 5]), slots=[3])
    assert [pages_of(caches, 0, block) for block in others] == before
    assert [slot for slot in range(ROWS) if region.row(slot).any()] == [3]


@pytest.mark.parametrize("blocks_per_chunk", [2, 4])
def test_a_load_may_begin_inside_a_chunk_and_end_inside_another(blocks_per_chunk: int) -> None:
    """vLLM's own prefix cache holds the first block, and the prompt ends within the last chunk."""
    caches = kv_caches([[64, 40]])
    stored = [5, 0, 7, 3, 11, 2, 6, 1]
    before = [pages_of(caches, 0, block) for block in stored]
    slots = [6, 1, 3, 0][: 8 // blocks_per_chunk]
    with worker(caches, blocks_per_chunk) as working:
        run(working, 1, store=True, gpu=one_group(stored), slots=slots)
        run(working, 2, store=False, gpu=one_group([12, 13, 14, 15, 16], first=1), slots=slots)
    assert [pages_of(caches, 0, block) for block in range(12, 17)] == before[1:6]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
def test_each_group_has_its_own_blocks_and_rows(blocks_per_chunk: int) -> None:
    """The middle group is empty; the others differ in pages, blocks and alignment."""
    caches = kv_caches([[64, 40], [32], [48]])
    stored = GPULoadStoreSpec(list(range(8)), group_sizes=[4, 0, 4], block_indices=[0, 0, 4])
    # Blocks 1 and 2 of the first group, 5 to 7 of the last, and their rows.
    into = GPULoadStoreSpec([13, 14, 17, 18, 19], group_sizes=[2, 0, 3], block_indices=[1, 0, 5])
    slots = list(range(8 // blocks_per_chunk))
    loaded = {1: [1, 2, 5, 6, 7], 2: [0, 1, 2, 3], 4: [0, 1]}[blocks_per_chunk]
    with worker(caches, blocks_per_chunk) as working:
        run(working, 1, store=True, gpu=stored, slots=slots)
        run(working, 2, store=False, gpu=into, slots=loaded)
    for block in (1, 2):
        assert pages_of(caches, 0, block + 12) == pages_of(caches, 0, block)
    for block in (5, 6, 7):
        assert pages_of(caches, 2, block + 12) == pages_of(caches, 2, block)


def test_a_cell_holds_tensor_after_tensor_block_by_block() -> None:
    """vLLM's own worker for devices has the same layout."""
    caches = kv_caches([[64, 40]], padding=24)
    region = Region.create(ROWS, 16 + cell_bytes(caches, 2))
    with worker(caches, 2, region=region, cell_offset=16) as working:
        run(working, 1, store=True, gpu=one_group([3, 9]), slots=[2])
    (a3, b3), (a9, b9) = pages_of(caches, 0, 3), pages_of(caches, 0, 9)
    in_order = [page + bytes(24) for page in (a3, a9, b3, b9)]
    assert region.row(2).tobytes() == bytes(16) + b"".join(in_order)


@pytest.fixture
def caches() -> CanonicalKVCaches:
    return kv_caches([[64]])


@pytest.fixture
def working(caches: CanonicalKVCaches) -> Iterator[HostWorker]:
    """Copies chunks of one block."""
    with worker(caches, 1) as working:
        yield working


def test_jobs_run_in_order_of_submission(working: HostWorker, caches: CanonicalKVCaches) -> None:
    """Each one reads what the one before wrote."""
    working.submit_store(1, one_group([0]), CPULoadStoreSpec([4]))
    working.submit_load(2, CPULoadStoreSpec([4]), one_group([1]))
    working.submit_store(3, one_group([1]), CPULoadStoreSpec([5]))
    working.submit_load(4, CPULoadStoreSpec([5]), one_group([2]))
    working.wait({4})
    finished = working.get_finished()
    assert working.get_finished() == []
    assert [result.job_id for result in finished] == [1, 2, 3, 4]
    assert all(result.success and result.transfer_size == 64 for result in finished)
    assert pages_of(caches, 0, 2) == pages_of(caches, 0, 0)


class HeldWorker(HostWorker):
    """Each job has one block, and the thread that copies it waits for `gate`. The other one has
    nothing to do. Records what was copied."""

    def __init__(self, caches: CanonicalKVCaches, region: Region) -> None:
        super().__init__(caches, region.array, 1, 0)
        self.gate = threading.Event()
        self.log: list[str] = []

    def submit(self) -> None:
        """Two jobs."""
        for job_id in (1, 2):
            self.submit_store(job_id, one_group([job_id]), CPULoadStoreSpec([job_id]))

    def _copy_blocks(self, is_store: bool, placements: Iterator[_Placement]) -> int:
        found = [*placements]
        for placement in found:
            self.gate.wait()
            self.log.append(f"copied {placement.block}")
        return super()._copy_blocks(is_store, iter(found))


@pytest.fixture
def held(caches: CanonicalKVCaches) -> Iterator[HeldWorker]:
    region = Region.create(ROWS, cell_bytes(caches, 1))
    held = HeldWorker(caches, region)
    yield held
    held.gate.set()
    held.shutdown()
    region.close()


def test_wait_returns_only_when_its_jobs_are_done(held: HeldWorker) -> None:
    """vLLM reuses their blocks at once."""
    waits = threading.Event()

    def wait() -> None:
        held.wait({7})  # unknown, or done long ago
        held.log.append("nothing to wait for")
        waits.set()
        held.wait({2})
        held.log.append("waited")

    held.submit()
    waiting = threading.Thread(target=wait)
    waiting.start()
    waits.wait()
    assert held.get_finished() == []
    held.gate.set()
    waiting.join()
    assert held.log == ["nothing to wait for", "copied 1", "copied 2", "waited"]


@pytest.mark.parametrize("slots", [[0, ROWS], [ROWS, 0]])
def test_a_failed_job_is_reported(working: HostWorker, slots: list[int]) -> None:
    """vLLM then ends the engine, which is better than a request that hangs."""
    working.submit_store(1, one_group([0, 1]), CPULoadStoreSpec(slots))
    working.submit_store(2, one_group([0]), CPULoadStoreSpec([0]))
    working.wait({1, 2})
    assert [result.success for result in working.get_finished()] == [False, True]


def test_an_expedited_load_is_a_load(working: HostWorker, caches: CanonicalKVCaches) -> None:
    """vLLM 0.33 and later submit them."""
    run(working, 1, store=True, gpu=one_group([0]), slots=[0])
    working.submit_load(2, CPULoadStoreSpec([0]), one_group([1]), expedited=True)
    working.wait({2})
    assert pages_of(caches, 0, 1) == pages_of(caches, 0, 0)


def test_shutdown_finishes_the_submitted_jobs(working: HostWorker) -> None:
    for job_id in range(4):
        working.submit_store(job_id, one_group([job_id]), CPULoadStoreSpec([job_id]))
    working.shutdown()
    assert len(working.get_finished()) == 4


# -- devices -----------------------------------------------------------------------------------

BLOCKS_PER_CHUNK = 2
WORKERS = 3
SLOT = 2


@pytest.fixture
def two_groups() -> CanonicalKVCaches:
    return kv_caches([[640, 400], [320]])


@pytest.fixture
def region(two_groups: CanonicalKVCaches) -> Region:
    cells = WORKERS * cell_bytes(two_groups, BLOCKS_PER_CHUNK)
    return Region.create(ROWS, -(-cells // ROW_ALIGNMENT) * ROW_ALIGNMENT)


@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_row_written_by_the_cpu_worker_is_read_through_the_view(
    rank: int, region: Region, two_groups: CanonicalKVCaches
) -> None:
    cell = cell_bytes(two_groups, BLOCKS_PER_CHUNK)
    working = HostWorker(two_groups, region.array, BLOCKS_PER_CHUNK, rank * cell)
    gpu = GPULoadStoreSpec([7, 3, 1, 8], group_sizes=[2, 2], block_indices=[0, 0])
    working.submit_store(1, gpu, CPULoadStoreSpec([SLOT, SLOT]))
    working.shutdown()
    (a7, b7), (a3, b3) = pages_of(two_groups, 0, 7), pages_of(two_groups, 0, 3)
    (c1,), (c8,) = pages_of(two_groups, 1, 1), pages_of(two_groups, 1, 8)
    device = DeviceRegion(Window(region), rank, [cell] * WORKERS)
    sizes = [tensor.page_size_bytes * BLOCKS_PER_CHUNK for tensor in two_groups.tensors]
    views = [device.create_next_worker_view(size)[SLOT].numpy().tobytes() for size in sizes]
    assert views == [a7 + a3, b7 + b3, c1 + c8]


@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_row_written_through_the_view_is_loaded_by_the_cpu_worker(
    rank: int, region: Region, two_groups: CanonicalKVCaches
) -> None:
    cell = cell_bytes(two_groups, BLOCKS_PER_CHUNK)
    device = DeviceRegion(Window(region), rank, [cell] * WORKERS)
    for tensor in two_groups.tensors:
        view = device.create_next_worker_view(tensor.page_size_bytes * BLOCKS_PER_CHUNK)
        view[SLOT] = tensor.tensor[4:6].reshape(-1)
    expected = [pages_of(two_groups, 0, block) for block in (4, 5)]
    working = HostWorker(two_groups, region.array, BLOCKS_PER_CHUNK, rank * cell)
    gpu = GPULoadStoreSpec([20, 21], group_sizes=[2, 0], block_indices=[0, 0])
    working.submit_load(1, CPULoadStoreSpec([SLOT]), gpu)
    working.shutdown()
    assert [pages_of(two_groups, 0, block) for block in (20, 21)] == expected


def test_a_view_covers_every_row(region: Region, two_groups: CanonicalKVCaches) -> None:
    view = DeviceRegion(Window(region), 1, [2720, 1280]).create_next_worker_view(1280)
    assert view.shape == (SPAN * ROWS, 1280)
    assert view.stride() == (region.row_bytes, 1)
    view[:ROWS].fill_(1)
    assert (region.array[:, 2720:4000] == 1).all()
    assert int(region.array.sum()) == ROWS * 1280


def test_a_neighbours_rows_are_behind_the_own_ones(
    region: Region, two_groups: CanonicalKVCaches
) -> None:
    theirs = Region.create(ROWS, region.row_bytes)
    theirs.array[1] = 5
    window = Window(region)
    window.map(ROWS, theirs)
    view = DeviceRegion(window, 1, [2720, 1280]).create_next_worker_view(1280)
    assert (view[ROWS + 1] == 5).all()
    gpu = GPULoadStoreSpec([0], group_sizes=[1, 0], block_indices=[0, 0])
    working = HostWorker(two_groups, window.array, BLOCKS_PER_CHUNK, 0)
    run(working, 1, store=False, gpu=gpu, slots=[ROWS + 1])
    working.shutdown()
    assert {*b"".join(pages_of(two_groups, 0, 0))} == {5}


def test_a_worker_gets_no_more_than_its_cell(region: Region) -> None:
    device = DeviceRegion(Window(region), 0, [1000])
    device.create_next_worker_view(1000)
    with pytest.raises(AssertionError):
        device.create_next_worker_view(1)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("cells", [[2720] * 3, [2720, 4080, 1360]], ids=["equal", "unequal"])
def test_the_ranges_to_register_are_whole_pages_around_the_cells(
    rank: int, cells: list[int], region: Region
) -> None:
    ranges = list(DeviceRegion(Window(region), rank, cells).iter_worker_slot_ranges())
    assert len(ranges) == ROWS
    for row, (offset, length) in enumerate(ranges):
        start = row * region.row_bytes + sum(cells[:rank])
        assert offset % ROW_ALIGNMENT == length % ROW_ALIGNMENT == 0
        assert offset <= start < offset + ROW_ALIGNMENT
        end = start + cells[rank]
        assert end <= offset + length < end + ROW_ALIGNMENT
        assert offset + length <= region.size


def test_cleaning_up_twice_is_harmless(region: Region) -> None:
    device = DeviceRegion(Window(region), 0, [1000])
    device.cleanup()
    device.cleanup()
    assert region.fd == -1


# -- the worker's connector --------------------------------------------------------------------

CACHES = kv_caches([[64]])
LAYERS = {name: torch.zeros(16, 2, BLOCK_TOKENS, 4, 64) for name in ("layer.0", "layer.1")}
"""Tensors as `cache_config` describes them."""


class Watched(HostWorker):
    def __init__(self, region: Region) -> None:
        super().__init__(CACHES, region.array, 1, 0)
        self.asked = 0

    def get_finished(self) -> list[TransferResult]:
        self.asked += 1
        return super().get_finished()


class Steps:
    """Steps of a worker, as vLLM's model runners make them."""

    def __init__(self, connector: XavierConnector, worker: Watched) -> None:
        self.connector, self.worker = connector, worker

    def __call__(self, metadata: OffloadingConnectorMetadata) -> tuple[set[str], set[int]]:
        """The requests that have been loaded, and the jobs that are completed."""
        connector = self.connector
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(Mock())
        connector.wait_for_save()  # type: ignore[no-untyped-call]
        self.worker.wait({1, 2})
        _, loaded = connector.get_finished(set())
        completed = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return loaded, set(completed.completed_jobs if completed else ())


@pytest.fixture
def step(
    model_folder: Path, cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Steps]:
    connector = XavierConnector(engine_config(model_folder), KVConnectorRole.WORKER, cache_config)
    region = Region.create(2, cell_bytes(CACHES, 1))
    worker = Watched(region)
    monkeypatch.setattr(XavierSpec, "get_worker", lambda *_: worker)
    connector.register_kv_caches(LAYERS)
    yield Steps(connector, worker)
    connector.shutdown()
    region.close()


def nothing() -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata({}, {})


STORE = {1: TransferJob("a", one_group([3]), CPULoadStoreSpec([0]))}
LOAD = {2: TransferJob("b", CPULoadStoreSpec([0]), one_group([5]))}


def test_a_worker_without_jobs_is_not_asked(step: Steps) -> None:
    for _ in range(3):
        assert step(nothing()) == (set(), set())
    assert not step.worker.asked


def test_a_store_begins_in_the_next_step_and_is_reported_once(step: Steps) -> None:
    assert step(OffloadingConnectorMetadata({}, dict(STORE))) == (set(), set())
    assert step(nothing()) == (set(), {1})
    asked = step.worker.asked
    assert step(nothing()) == (set(), set())
    assert step.worker.asked == asked


def test_a_store_that_vllm_flushes_is_reported_in_its_step(step: Steps) -> None:
    """vLLM takes it out of the metadata, since its request is preempted."""
    flushed = OffloadingConnectorMetadata({}, dict(STORE), {1})
    assert step(flushed) == (set(), {1})


def test_what_was_stored_is_loaded(step: Steps) -> None:
    step(OffloadingConnectorMetadata({}, dict(STORE)))
    step(nothing())
    assert step(OffloadingConnectorMetadata(dict(LOAD), {})) == ({"b"}, {2})
    assert pages_of(CACHES, 0, 5) == pages_of(CACHES, 0, 3)
