"""Whatever happens, every request reads what belongs to its own tokens, and nothing is left behind.

The runs are those of `Simulation`; see there how to repeat one. That they would notice is tested by
switching off what keeps the bytes right.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.engine.vllm_scheduler import engine_config
from tests.simulation.neighbours import Neighbourhood
from tests.simulation.options import Options
from tests.simulation.simulation import Mutation, Simulation, SimulationError
from tests.simulation.worker import CopyJobs
from xinference_xavier.engine import connector
from xinference_xavier.engine.adapters import Look, Unconfirmed
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.worker_side import HostWorker
from xinference_xavier.limits import LOOK
from xinference_xavier.pool import region
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.region import COPY_THREADS
from xinference_xavier.replica import disk as replica_disk
from xinference_xavier.replica import donor
from xinference_xavier.replica.disk import Disk
from xinference_xavier.replica.fetcher import Fetch, Fetcher
from xinference_xavier.replica.neighbours import Neighbour

RUNS = 24
LONG_TESTS, LONG_RUNS = 20, 150
ENOUGH = 30
"""Runs among which one notices each mutation."""


@pytest.fixture(scope="module")
def config(model_folder: Path) -> Iterator[VllmConfig]:
    logging.disable(logging.WARNING)  # vLLM tells of each engine that it makes
    yield engine_config(model_folder)
    logging.disable(logging.NOTSET)


def run(seed: int, config: VllmConfig, mutate: Mutation | None = None, **what: object) -> int:
    """Returns the number of checked reads. `what` are options that the seed does not choose."""
    options = Options(seed)
    vars(options).update(what)
    simulation = Simulation(options, config, mutate)
    simulation.run()
    return simulation.reads


@pytest.mark.parametrize("seed", range(RUNS))
def test_every_read_finds_what_its_own_tokens_left_there(seed: int, config: VllmConfig) -> None:
    assert run(seed, config) > 0


@pytest.mark.long
@pytest.mark.parametrize("number", range(LONG_TESTS))
def test_so_it_does_in_thousands_of_runs(number: int, config: VllmConfig) -> None:
    first = 1000 + number * LONG_RUNS
    assert sum(run(seed, config) for seed in range(first, first + LONG_RUNS)) > 0


def test_a_seed_always_gives_the_same_run(config: VllmConfig) -> None:
    each = (Options(seed) for seed in count())
    options = next(found for found in each if found.disk and found.adapters)
    told: list[list[str]] = [[], []]
    for events in told:
        simulation = Simulation(options, config)
        simulation.on_event = events.append
        simulation.run()
    assert told[0] == told[1]


def _nothing(*_: object) -> None:
    pass


def _copy_until_one_thread_ends(worker: HostWorker, job: Any) -> int:
    placements = iter([*worker._placements(job)])
    copying = [
        worker._copy_threads.submit(worker._copy_blocks, job.is_store, placements)
        for _ in range(COPY_THREADS)
    ]
    return sum(copied.result() for copied in wait(copying, return_when=FIRST_COMPLETED).done)


def _free_at_once(patch: pytest.MonkeyPatch) -> None:
    reset = Pool.reset

    def free_and_reset(pool: Pool) -> None:
        pool.abort(*pool.rows())
        reset(pool)

    patch.setattr(Pool, "reset", free_and_reset)


def _stay(patch: pytest.MonkeyPatch) -> None:
    move = Disk.move

    def begin(disk: Disk, namespace: str | None) -> None:
        if disk._namespace is None:
            move(disk, namespace)

    patch.setattr(Disk, "move", begin)
    patch.setattr(Disk, "reset", _nothing)
    patch.setattr(replica_disk, "difference", _nothing)  # or its canary would tell


def _release_when_loads_begin(patch: pytest.MonkeyPatch) -> None:
    async def until_scheduled(
        fetcher: Fetcher, fetch: Fetch, neighbour: Neighbour, *more: Any
    ) -> None:
        while True:
            await asyncio.sleep(LOOK)
            if any(row.pins > 1 for row in fetch.rows):
                break
        neighbour.loans -= 1
        more[-1]()

    patch.setattr(Fetcher, "_until_returned", until_scheduled)


def _take_for_own(patch: pytest.MonkeyPatch) -> None:
    unpin = Pool.unpin

    def take(pool: Pool, rows: Sequence[Row]) -> None:
        for row in rows:
            row.is_lent = False
        unpin(pool, rows)

    patch.setattr(Pool, "unpin", take)


def _forget_where_it_begins(patch: pytest.MonkeyPatch) -> None:
    mapping = Neighbourhood._mapping

    async def from_the_start(neighbours: Neighbourhood, name: str) -> Neighbour:
        neighbour = await mapping(neighbours, name)
        neighbour.first = 0
        return neighbour

    patch.setattr(Neighbourhood, "_mapping", from_the_start)


def _forget_loans(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Neighbour, "loans", property(lambda _: 0, _nothing), raising=False)


NEAR: dict[str, object] = {
    "nearby": 1.0, "lent": 12, "upsets": 0.05, "arrivals": 0.6, "adaptive": False, "copies": 0.05,
    "interrupts": 0.4, "adapters": False, "disk": None, "step_seconds": 0.1,
}  # fmt: skip
ADAPTERS: dict[str, object] = {
    "adapters": True, "aborts": 0.0, "forgets": 0.0, "resets": 0.0, "copies": 1.0,
    "step_seconds": 0.01, "interrupts": 0.4, "blocks": 300,
}  # fmt: skip
DISK: dict[str, object] = {
    "adapters": False, "disk": "all", "damages": 0.3, "forgets": 0.0, "slots": 24,
    "step_seconds": 0.01, "interrupts": 0.4, "arrivals": 0.6, "adaptive": False,
}  # fmt: skip
MUTATIONS: dict[str, tuple[Mutation, dict[str, object]]] = {
    "stores are never voided": (
        lambda patch: patch.setattr(XavierManager, "void_store", _nothing),
        {"arrivals": 0.6, "aborts": 0.0, "resets": 0.0, "disk": None, "interrupts": 0.4},
    ),
    "weights change unseen": (
        lambda patch: patch.setattr(connector.XavierConnector, "_leave_weights", _nothing),
        {},
    ),
    "the pool is not reset": (lambda patch: patch.setattr(Pool, "reset", _nothing), {}),
    "the fast path is always taken": (
        lambda patch: patch.setattr(connector, "is_steady_decode", lambda _: True),
        {},
    ),
    "nobody waits for copies of reused blocks": (
        lambda patch: patch.setattr(CopyJobs, "wait", _nothing),
        {},
    ),
    "a job ends when the first of its copy threads does": (
        lambda patch: patch.setattr(HostWorker, "_copy", _copy_until_one_thread_ends),
        {},
    ),
    "a reset frees rows that are still written": (
        _free_at_once,
        {
            "resets": 0.15,
            "forgets": 0.0,
            "slots": 12,
            "arrivals": 0.6,
            "step_seconds": 0.01,
            "transfers": 0.2,
            "nearby": 0.0,
        },
    ),
    "rows on the disk are not verified": (
        lambda patch: patch.setattr(region, "checksum", lambda row, key: 1),
        DISK | {"resets": 0.0},
    ),
    "after new weights, the disk is still that of the former ones": (
        _stay,
        DISK | {"resets": 0.04, "damages": 0.0},
    ),
    "blocks of an adapter that was replaced are stored as the new one's": (
        lambda patch: patch.setattr(Look, "replaces", False),
        ADAPTERS,
    ),
    "vLLM loads an adapter before anybody has looked at its files": (
        lambda patch: patch.setattr(Look, "is_awaited", lambda *_: False),
        ADAPTERS,
    ),
    "nobody looks whether an adapter's files have changed": (
        lambda patch: patch.setattr(Unconfirmed, "is_confirmed", True),
        ADAPTERS,
    ),
    "a grant ends when a request begins to load its rows": (_release_when_loads_begin, NEAR),
    "a grant of what is loaded in place expires": (
        lambda patch: patch.setattr(donor, "math", SimpleNamespace(inf=0.0)),
        NEAR,
    ),
    "rows that neighbours lend are kept like own ones": (_take_for_own, NEAR),
    "a neighbour's slots are taken for own ones": (_forget_where_it_begins, NEAR),
    "what a neighbour that ends has lent is unmapped at once": (
        _forget_loans,
        NEAR | {"upsets": 0.3, "resets": 0.0},
    ),
}
"""Each with options under which it shows soon."""


@pytest.mark.parametrize(("mutate", "options"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutation_is_noticed(
    mutate: Mutation, options: dict[str, object], config: VllmConfig
) -> None:
    for seed in range(ENOUGH):
        try:
            run(seed, config, mutate, **options)
        except SimulationError:
            return
    pytest.fail(f"{ENOUGH} runs did not notice it")
