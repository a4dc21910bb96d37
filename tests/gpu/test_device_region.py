"""vLLM's worker for CUDA over our region: peers fetch the bytes that it stores, and it loads those
that they fetched. Needs a card, but no model."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from examples.processes import until
from tests.engine.caches import cell_bytes, kv_caches, pages_of
from tests.harness.remote import Remote, spawned, tell_ready
from xinference_xavier.engine.worker_side import (
    DevicePinning,
    DeviceRegion,
    HostWorker,
    device_worker,
)
from xinference_xavier.pool.region import (
    ROW_ALIGNMENT,
    Region,
    populate,
    receive_region,
    serve_region,
)
from xinference_xavier.pool.window import Window

pytestmark = pytest.mark.gpu

BLOCKS_PER_CHUNK = 2
WORKERS = 2
ROUNDS = 200
DEADLINE = 60.0
OTHER = {"cuda": "cpu", "cpu": "cuda"}
SOURCE, TARGET = [7, 3, 1, 8], [20, 21, 22, 23]
"""Block numbers; two chunks of each group."""


class Layout(NamedTuple):
    """Sizes in bytes: of each group's pages, and of the padding after each block."""

    groups: Sequence[Sequence[int]]
    padding: int = 0

    def caches(self, seed: int, device: str) -> CanonicalKVCaches:
        return kv_caches(self.groups, seed, self.padding, device)

    @property
    def rows(self) -> int:
        """Rows for the blocks of `SOURCE`."""
        return len(self.groups) * len(SOURCE) // BLOCKS_PER_CHUNK


LAYOUTS = {
    "pages that a kernel loads": Layout([[640, 400]]),
    "pages of odd sizes": Layout([[643, 401]]),
    "large pages": Layout([[256 << 10, 512 << 10]]),
    "two groups": Layout([[8192, 8192], [4096]]),
    "padded blocks": Layout([[4096, 2048]], padding=1024),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param  # type: ignore[no-any-return]


def region_for(caches: CanonicalKVCaches, rows: int) -> Region:
    cells = WORKERS * cell_bytes(caches, BLOCKS_PER_CHUNK)
    return Region.create(rows, -(-cells // ROW_ALIGNMENT) * ROW_ALIGNMENT)


def mapped_again(region: Region) -> Region:
    """The region with a mapping of its own, as in another process."""
    name = uuid4().hex
    server = serve_region(region, name)
    try:
        return receive_region(name, DEADLINE)
    finally:
        server.close()


@contextmanager
def of_the_card(caches: CanonicalKVCaches, region: Region, rank: int) -> Iterator[OffloadingWorker]:
    """vLLM's worker, which closes `region` at the end."""
    view = DeviceRegion(Window(region), rank, [cell_bytes(caches, BLOCKS_PER_CHUNK)] * WORKERS)
    worker = device_worker(caches, BLOCKS_PER_CHUNK, view)
    try:
        yield worker
    finally:
        worker.shutdown()


@contextmanager
def of_the_host(caches: CanonicalKVCaches, region: Region, rank: int) -> Iterator[OffloadingWorker]:
    """Our worker for the CPU platform."""
    offset = rank * cell_bytes(caches, BLOCKS_PER_CHUNK)
    worker = HostWorker(caches, region.array, BLOCKS_PER_CHUNK, offset)
    try:
        yield worker
    finally:
        worker.shutdown()


def spec(blocks: Sequence[int], groups: int, start: int = 0) -> GPULoadStoreSpec:
    """These blocks of each group; the first one is block number `start` of its prompt."""
    return GPULoadStoreSpec(
        [*blocks] * groups, group_sizes=[len(blocks)] * groups, block_indices=[start] * groups
    )


def store(worker: OffloadingWorker, blocks: GPULoadStoreSpec, rows: Sequence[int]) -> None:
    worker.submit_store(1, blocks, CPULoadStoreSpec([*rows]))
    finish(worker)


def load(worker: OffloadingWorker, rows: Sequence[int], blocks: GPULoadStoreSpec) -> None:
    worker.submit_load(1, CPULoadStoreSpec([*rows]), blocks)
    finish(worker)


def finish(worker: OffloadingWorker) -> None:
    worker.wait({1})
    deadline = time.monotonic() + DEADLINE
    while not (results := worker.get_finished()):
        assert time.monotonic() < deadline, "a copy never ended"
    assert [(result.job_id, result.success) for result in results] == [(1, True)]


def pages(caches: CanonicalKVCaches, blocks: Sequence[int]) -> list[list[bytes]]:
    """The pages of these blocks, group by group."""
    groups = range(len(caches.group_data_refs))
    return [pages_of(caches, group, block) for group in groups for block in blocks]


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("rank", range(WORKERS))
@pytest.mark.parametrize("storing", ["cuda", "cpu"])
def test_what_one_kind_of_worker_stores_the_other_loads(
    layout: Layout, storing: str, rank: int, start: int
) -> None:
    """The load begins at block `start`: vLLM's own prefix cache may hold a chunk's first one."""
    source, target = layout.caches(1, storing), layout.caches(2, OTHER[storing])
    groups, rows = len(layout.groups), range(layout.rows)
    region = region_for(source, layout.rows)
    other = mapped_again(region)
    untouched = pages(target, TARGET[:start])
    of_the_card_s, of_the_host_s = (source, target) if storing == "cuda" else (target, source)
    with (
        of_the_card(of_the_card_s, region, rank) as card,
        of_the_host(of_the_host_s, other, rank) as host,
    ):
        stores, loads = (card, host) if storing == "cuda" else (host, card)
        store(stores, spec(SOURCE, groups), rows)
        load(loads, rows, spec(TARGET[start:], groups, start))
    assert pages(target, TARGET[start:]) == pages(source, SOURCE[start:])
    assert pages(target, TARGET[:start]) == untouched
    other.close()


@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_neighbours_rows_are_loaded_from_where_they_are(layout: Layout, rank: int) -> None:
    """The driver pins the mapping of a region that another process has pinned, too."""
    source, target = layout.caches(1, "cuda"), layout.caches(2, "cuda")
    groups, rows = len(layout.groups), range(layout.rows)
    theirs = region_for(source, layout.rows)
    window = Window(region_for(target, layout.rows))
    mapped = window.map(len(rows), theirs, writable=True)
    pinning = DevicePinning()
    pinning.pin(mapped)
    view = DeviceRegion(window, rank, [cell_bytes(target, BLOCKS_PER_CHUNK)] * WORKERS)
    worker = device_worker(target, BLOCKS_PER_CHUNK, view)
    with of_the_card(source, theirs, rank) as card:
        store(card, spec(SOURCE, groups), rows)
        load(worker, [len(rows) + row for row in rows], spec(TARGET, groups))
    assert pages(target, TARGET) == pages(source, SOURCE)
    pinning.unpin(mapped)
    window.unmap(len(rows), len(rows))
    worker.shutdown()


def test_the_region_is_pinned_until_it_is_given_back(layout: Layout) -> None:
    caches = layout.caches(1, "cuda")
    region = region_for(caches, layout.rows)
    other = mapped_again(region)
    for _ in range(2):  # the driver has released the first one
        view = DeviceRegion(Window(region), 0, [cell_bytes(caches, BLOCKS_PER_CHUNK)])
        worker = device_worker(caches, BLOCKS_PER_CHUNK, view)
        assert view.is_pinned
        assert view.base_tensor.is_pinned()
        worker.shutdown()
        assert not view.is_pinned
        assert region.fd == -1
        region, other = other, mapped_again(other)
    region.close()
    other.close()


def test_peers_write_and_read_other_rows_while_the_card_copies() -> None:
    """Their mappings are not pinned; they share only the memory with the card's copies."""
    layout = LAYOUTS["large pages"]
    caches = layout.caches(1, "cuda")
    region = region_for(caches, 3 * layout.rows)
    peers = mapped_again(region)
    stored, loaded, fetched = (range(n * layout.rows, (n + 1) * layout.rows) for n in range(3))
    done = threading.Event()

    def fetch() -> int:
        count = 0
        while not done.is_set():
            count += 1
            peers.array[fetched.start : fetched.stop] = count % 256
        return count

    counts: list[int] = []
    fetching = threading.Thread(target=lambda: counts.append(fetch()))
    with of_the_card(caches, region, 0) as card:
        store(card, spec(SOURCE, 1), loaded)
        fetching.start()
        try:
            for _ in range(ROUNDS):
                store(card, spec(SOURCE, 1), stored)
                load(card, loaded, spec(TARGET, 1))
                assert (
                    peers.array[stored.start : stored.stop]
                    == peers.array[loaded.start : loaded.stop]
                ).all()
        finally:
            done.set()
            fetching.join()
        assert pages(caches, TARGET) == pages(caches, SOURCE)
        assert (region.array[fetched.start : fetched.stop] == counts[0] % 256).all()
    peers.close()


def test_a_killed_worker_leaves_nothing(tmp_path: Path) -> None:
    """Neither shared memory nor the driver's pins."""
    before = shared_memory_bytes()
    size = 1 << 30
    worker = Remote(pin_and_wait, size, context=spawned())
    try:
        worker.wait_until_ready()
        assert shared_memory_bytes() >= before + size
    finally:
        worker.kill()
    assert until(lambda: shared_memory_bytes() < before + size // 2, DEADLINE), "not freed"
    with of_the_card(*_large(size), 0):  # the card is usable again
        pass


def pin_and_wait(pipe: Connection, size: int) -> None:
    caches, region = _large(size)
    populate(region.array)
    with of_the_card(caches, region, 0):
        torch.cuda.synchronize()
        tell_ready(pipe)
        pipe.recv()


def _large(size: int) -> tuple[CanonicalKVCaches, Region]:
    caches = LAYOUTS["large pages"].caches(1, "cuda")
    row_bytes = WORKERS * cell_bytes(caches, BLOCKS_PER_CHUNK)
    return caches, Region.create(size // row_bytes, row_bytes)


def shared_memory_bytes() -> int:
    """Shared memory of all processes, including unnamed files."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) << 10
    raise LookupError("/proc/meminfo has no line for shared memory")
