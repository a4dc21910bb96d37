"""All processes of one engine agree on the layout of its rows, and errors name the remedy. A pool
is by default as large as its engine's KV cache, within a share of the free memory."""

import json
import multiprocessing
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.engine.any_version import called
from tests.engine.caches import BLOCKS, cell_bytes, kv_caches, pages_of
from tests.engine.scheduling import ONE_GROUP
from tests.engine.vllm_scheduler import engine_config
from xinference_xavier.config import XavierConfig
from xinference_xavier.engine import identity
from xinference_xavier.engine import spec as spec_module
from xinference_xavier.engine.facts import EngineFacts, SchedulerFacts, xavier_config
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.spec import MIN_ROWS, WorkerNote, XavierSpec, rows_of
from xinference_xavier.engine.worker_side import DeviceRegion, HostWorker
from xinference_xavier.errors import ConfigError, RegionError
from xinference_xavier.pool import region as region_module
from xinference_xavier.pool.region import ROW_ALIGNMENT, Region, receive_region
from xinference_xavier.pool.window import SPAN
from xinference_xavier.replica.replica import Replica

MiB, GiB = 1 << 20, 1 << 30
BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = 4
PAGES = [640, 400]
BLOCK_BYTES = sum(PAGES)


def options(**values: object) -> XavierConfig:
    return XavierConfig.from_dict(
        XavierConfig("model", "127.0.0.1:1").to_dict() | {"pool_bytes": 1 << 20} | values
    )


def offloading_config(*, rank: int = 0, workers: int = 1) -> OffloadingConfig:
    layers = ("layer.0", "layer.1")
    return OffloadingConfig(
        groups=(
            called(
                OffloadingGroupConfig, tokens_per_block=BLOCK_TOKENS, layer_names=layers, group_id=0
            ),
        ),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=str(uuid.uuid4()),
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(BLOCK_TOKENS, BLOCKS_PER_CHUNK),
        parallel=called(
            OffloadingParallelConfig,
            rank=rank,
            world_size=workers,
            tp_size=workers,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


@pytest.fixture
def engine(model_folder: Path, cache_config: KVCacheConfig) -> EngineFacts:
    vllm_config = engine_config(model_folder)
    return replace(
        EngineFacts.read(xavier_config(vllm_config), vllm_config, cache_config),
        config=options(),
        offloading=offloading_config(),
    )


def worker_of(engine: EngineFacts, caches: CanonicalKVCaches) -> HostWorker:
    worker = XavierSpec(engine).get_worker(caches)
    assert isinstance(worker, HostWorker)
    return worker


def test_a_pool_of_no_given_size_holds_the_cache(engine: EngineFacts) -> None:
    """Its size is known to the scheduler's side, too."""
    single = replace(engine.offloading, cache=OffloadingCacheConfig(BLOCK_TOKENS, 1))
    engine = replace(engine, config=options(pool_bytes=None), offloading=single)
    worker = worker_of(engine, kv_caches([PAGES]))
    try:
        region = receive_region(single.engine_id, timeout=5)
        assert region.rows == BLOCKS
        assert WorkerNote(*json.loads(region.note)).cache_rows == BLOCKS
    finally:
        worker.shutdown()


def gib(
    *,
    cache: float,
    free: float,
    replicas: int = 1,
    engines: int = 1,
    workers: int = 1,
    row: int = MiB,
    given: float | None = None,
    promised: float | None = None,
) -> float:
    """The size of a pool in GiB, as are `cache`, `free`, `given` and `promised`."""
    config = XavierConfig(
        "m",
        "127.0.0.1:1",
        pool_bytes=None if given is None else round(given * GiB),
        replicas_per_host=replicas,
        engines=engines,
    )
    rows = rows_of(
        config,
        row_bytes=row,
        cache_rows=round(cache * GiB / row),
        workers=workers,
        free=round(free * GiB),
        page_cache=MiB,
        promised=None if promised is None else round(promised * GiB),
    )
    return rows * row / GiB


@pytest.mark.parametrize(
    ("cache", "free", "replicas", "workers", "row", "size"),
    [
        pytest.param(56, 1900, 8, 1, 7 * MiB, 56, id="8 H100, one each for a 7B model"),
        pytest.param(140, 1900, 2, 4, 40 * MiB, 140, id="8 H100, four each for a 72B model"),
        pytest.param(56, 800, 8, 1, 7 * MiB, 25 * 512 / 522, id="8 H100, little memory"),
        pytest.param(4, 16, 2, 1, MiB, 2 * 512 / 516, id="processors, whose memory has the cache"),
        pytest.param(1, 16, 2, 1, MiB, 1, id="processors, a small cache"),
        pytest.param(4, 2, 1, 1, MiB, 0.5 * 512 / 515, id="a small container"),
    ],
)
def test_the_cache_or_a_share_of_a_quarter_of_the_free_memory(
    cache: float, free: float, replicas: int, workers: int, row: int, size: float
) -> None:
    """Page tables take 1/512 for each process: the engine, its transfer process, and the workers of
    all replicas."""
    found = gib(cache=cache, free=free, replicas=replicas, workers=workers, row=row)
    assert 0 <= size - found < row / GiB * 1.01


def test_the_engines_of_a_replica_share_its_part() -> None:
    assert gib(cache=9, free=64, replicas=2, engines=2) == gib(cache=9, free=64, replicas=4)
    assert gib(cache=9, free=64, engines=2, given=8) == 4


@pytest.mark.parametrize("given", [0.5, 4, 12])
def test_a_given_size_is_taken_whatever_cache_and_quarter_are(given: float) -> None:
    assert gib(cache=2, free=16, given=given) == given


@pytest.mark.parametrize(("cache", "free"), [(0, 64), (4, 17 / 1024)])
def test_a_pool_is_large_enough_to_work_if_memory_allows(cache: float, free: float) -> None:
    assert gib(cache=cache, free=free) == MIN_ROWS / 1024


@pytest.mark.parametrize("given", [None, 16 / 1024])
def test_a_pool_needs_its_memory_with_the_page_tables(given: float | None) -> None:
    with pytest.raises(ConfigError) as refused:
        gib(cache=4, free=16 / 1024, given=given)
    message = str(refused.value)
    assert message.startswith(f"xavier_pool_bytes={16 * MiB} takes ")
    assert f" that are free ({MiB} of them hold page cache); use less, or leave it out" in message


@pytest.mark.parametrize(("free", "promised"), [(100, None), (100, 40), (75, 15), (60, 0)], ids=str)
def test_all_pools_of_a_host_share_its_free_memory(free: float, promised: float | None) -> None:
    """At first nothing is allocated, then a part of the first pool, then all of it."""
    assert gib(cache=4, free=free, replicas=2, given=40, promised=promised) == 40
    with pytest.raises(ConfigError) as refused:
        gib(cache=4, free=free - 20, replicas=2, given=40, promised=promised)
    message = str(refused.value)
    assert message.startswith(f"xavier_pool_bytes={40 * GiB} takes ")
    needed = 40 * GiB * (512 + 4) // 512  # with page tables in four processes
    others = needed if promised is None else round(promised * GiB)
    assert (f", {needed + others} with what other pools on this host" in message) == (others > 0)


def test_a_refusal_names_the_least_size_in_the_option_s_units() -> None:
    with pytest.raises(ConfigError, match=f"use at least {2 * MIN_ROWS * MiB}$"):
        gib(cache=4, free=64, engines=2, given=31 / 1024)
    assert gib(cache=4, free=64, engines=2, given=32 / 1024) == MIN_ROWS / 1024


def test_replicas_whose_workers_have_other_pages_do_not_meet(
    engine: EngineFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a worker knows what its pages are like. Their sizes may be equal."""
    replicas: list[Replica] = []
    monkeypatch.setattr(Replica, "start", lambda replica: replicas.append(replica))

    def namespace(kernels: str, block_bytes: int = BLOCK_BYTES) -> str:
        monkeypatch.setattr(identity, "page_format", lambda *_: [{"kernels": [kernels]}])
        offloading = replace(offloading_config(), worker_kv_bytes_per_block=block_bytes)
        facts = replace(engine, offloading=offloading)
        worker = worker_of(facts, kv_caches([PAGES]))
        XavierSpec(facts).get_manager()
        worker.shutdown()
        return replicas[-1].namespace.current

    own = namespace("amx")
    assert namespace("amx") == own
    assert namespace("vec") != own
    assert namespace("amx", block_bytes=BLOCK_BYTES + 8) != own, "a row is as long as before"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_pool_counts_what_others_on_its_host_have_still_to_take(
    engine: EngineFacts, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(region_module, "_FILE", uuid.uuid4().hex)  # hidden from other tests
    create = Region.create
    theirs: list[Region] = []

    def after_another(*size: int) -> Region:
        theirs.append(create(1 << 20, MiB))
        return create(*size)

    if when == "before":
        after_another(1, MiB).close()
    else:
        monkeypatch.setattr(Region, "create", after_another)
    with pytest.raises(ConfigError, match="with what other pools on this host have still to take"):
        worker_of(engine, kv_caches([PAGES]))
    monkeypatch.setattr(Region, "create", create)
    theirs.pop().close()
    worker_of(engine, kv_caches([PAGES])).shutdown()


@pytest.mark.parametrize("patience", ["600", "0"])
def test_a_pool_for_a_device_is_allocated_before_it_is_pinned(
    engine: EngineFacts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    patience: str,
) -> None:
    """However large it is. vLLM waits meanwhile: the log says for what, and warns in time."""
    monkeypatch.setattr(spec_module, "_POPULATE_AT_ONCE", ROW_ALIGNMENT)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", patience)
    caplog.set_level("INFO", spec_module.__name__)
    missing = []

    def pin(caches: CanonicalKVCaches, blocks: int, region: DeviceRegion) -> None:
        missing.append(region.total_size_bytes - region._own.allocated)
        region.cleanup()

    monkeypatch.setattr(spec_module, "device_worker", pin)
    XavierSpec(engine).get_worker(kv_caches([PAGES]))
    assert missing == [0]
    created, *lines = caplog.messages
    assert created.startswith("pool created: ")
    assert lines.pop(0).startswith("vLLM waits until the pool is allocated: bytes=")
    assert lines.pop().startswith("pool allocated: seconds=")
    warned = ["vLLM may give up before" in line for line in lines]
    assert warned == ([True] if patience == "0" else [])


class TestWorkers:
    """All workers of one engine share its region, each in a cell of its own."""

    @pytest.fixture
    def caches(self) -> list[CanonicalKVCaches]:
        return [kv_caches([PAGES], seed=rank) for rank in range(2)]

    @pytest.fixture
    def workers(
        self, engine: EngineFacts, caches: list[CanonicalKVCaches]
    ) -> Iterator[list[HostWorker]]:
        first = offloading_config(workers=2)
        with ExitStack() as stack:
            made = []
            for rank in range(2):
                own = replace(first, parallel=replace(first.parallel, rank=rank))
                worker = worker_of(replace(engine, offloading=own), caches[rank])
                stack.callback(worker.shutdown)
                made.append(worker)
            yield made

    def test_a_row_holds_all_cells_in_whole_pages(
        self, workers: list[HostWorker], caches: list[CanonicalKVCaches]
    ) -> None:
        rows, row_bytes = workers[0]._rows.shape
        rows //= SPAN
        assert row_bytes % ROW_ALIGNMENT == 0
        assert 0 <= row_bytes - 2 * cell_bytes(caches[0], BLOCKS_PER_CHUNK) < ROW_ALIGNMENT
        assert rows == (1 << 20) // row_bytes

    def test_both_load_what_they_stored_in_one_row(
        self, workers: list[HostWorker], caches: list[CanonicalKVCaches]
    ) -> None:
        for worker in workers:
            gpu = GPULoadStoreSpec([0, 1, 2, 3], group_sizes=[4], block_indices=[0])
            worker.submit_store(1, gpu, CPULoadStoreSpec([5]))
            worker.wait({1})
        for worker, cache in zip(workers, caches, strict=True):
            gpu = GPULoadStoreSpec([8, 9, 10, 11], group_sizes=[4], block_indices=[0])
            worker.submit_load(2, CPULoadStoreSpec([5]), gpu)
            worker.wait({2})
            for source, copy in zip(range(4), range(8, 12), strict=True):
                assert pages_of(cache, 0, copy) == pages_of(cache, 0, source)

    def test_workers_that_disagree_on_the_layout_do_not_start(self, engine: EngineFacts) -> None:
        first = offloading_config(workers=2)
        worker = worker_of(replace(engine, offloading=first), kv_caches([PAGES]))
        other = replace(
            first,
            parallel=replace(first.parallel, rank=1),
            cache=replace(first.cache, blocks_per_chunk=2),
        )
        with pytest.raises(RegionError, match="this process expects"):
            worker_of(replace(engine, offloading=other), kv_caches([PAGES]))
        worker.shutdown()


@pytest.mark.parametrize("ranks", ["pipeline_parallel_size", "data_parallel_size"])
def test_an_engine_that_computes_in_step_with_others_is_not_alone(
    engine: EngineFacts, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_alone() -> bool:
        return SchedulerFacts.for_region(engine, ONE_GROUP, ROW_ALIGNMENT, shares=True).alone

    assert is_alone()
    monkeypatch.setattr(engine.vllm.parallel_config, ranks, 2)
    assert not is_alone()


STAGES = (9, 10, 9)  # layers; the first stage is not the largest one
STAGES_POOL = 2 << 20
SLOT = 5


def stage_facts(engine: EngineFacts, rank: int) -> EngineFacts:
    offloading = offloading_config(rank=rank, workers=len(STAGES))
    return replace(
        engine,
        config=options(pool_bytes=STAGES_POOL),
        offloading=replace(
            offloading,
            engine_id=engine.offloading.engine_id,
            worker_kv_bytes_per_block=STAGES[rank] * PAGES[0],
            parallel=replace(offloading.parallel, tp_size=1, pp_size=len(STAGES)),
        ),
    )


def stage(rank: int, engine: EngineFacts, meeting: Path, pipe: Connection) -> None:
    """A stage's worker, which stores a chunk and, when told to, loads it into other blocks."""
    torch.distributed.init_process_group(
        "gloo", f"file://{meeting}", world_size=len(STAGES), rank=rank
    )
    # vLLM's own group would leave segments in /dev/shm.
    pipeline = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
    caches = kv_caches([PAGES[:1] * STAGES[rank]], seed=rank)
    layers = {f"stage {rank}, {n}": page.tensor for n, page in enumerate(caches.tensors)}
    group = replace(engine.groups[0], layer_names=[*layers])
    facts = replace(stage_facts(engine, rank), groups={0: group})
    with patch.object(spec_module, "get_pp_group", lambda: pipeline):
        worker = XavierSpec(facts, layers).get_worker(caches)
    assert isinstance(worker, HostWorker)
    blocks = GPULoadStoreSpec([0, 1, 2, 3], group_sizes=[4], block_indices=[0])
    worker.submit_store(1, blocks, CPULoadStoreSpec([SLOT]))
    worker.wait({1})
    pipe.send("stored")
    pipe.recv()
    others = GPULoadStoreSpec([8, 9, 10, 11], group_sizes=[4], block_indices=[0])
    worker.submit_load(2, CPULoadStoreSpec([SLOT]), others)
    worker.wait({2})
    pipe.send(all(pages_of(caches, 0, to + 8) == pages_of(caches, 0, to) for to in range(4)))
    pipe.recv()  # the region is there until then


@pytest.mark.process
def test_stages_with_different_numbers_of_layers_share_rows(
    tmp_path: Path, engine: EngineFacts
) -> None:
    """vLLM gives each stage's worker its own layers only, and the scheduler's side the first's."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(len(STAGES)):
            ours, theirs = context.Pipe()
            arguments = (rank, engine, tmp_path / "meeting", theirs)
            process = context.Process(target=stage, args=arguments, daemon=True)
            process.start()
            theirs.close()  # then a stage that fails ends the wait for it
            pipes.append(ours)
            processes.append(process)
        assert [pipe.recv() for pipe in pipes] == ["stored"] * len(STAGES)
        for pipe in pipes:
            pipe.send("load")
        assert [pipe.recv() for pipe in pipes] == [True] * len(STAGES)
        spec = XavierSpec(stage_facts(engine, 0))
        try:
            manager = spec.get_manager()
            assert isinstance(manager, XavierManager)
            cells = BLOCKS_PER_CHUNK * PAGES[0] * sum(STAGES)
            row_bytes = manager.facts.row_bytes
            assert 0 <= row_bytes - cells < ROW_ALIGNMENT
            assert manager.pool.slots == STAGES_POOL // row_bytes
            names = {name.split(", worker")[0] for name in manager.probes._sketcher.layers}
            assert names == {f"stage {rank}, {n}" for rank in range(3) for n in range(STAGES[rank])}
        finally:
            spec.close()
    finally:
        for process in processes:
            process.kill()
            process.join()
