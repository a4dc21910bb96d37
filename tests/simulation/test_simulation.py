"""Whatever happens, every request reads what belongs to its own tokens, and nothing is left behind.

The runs are those of `Simulation`; see there how to repeat one. That they would notice is tested by
switching off what keeps the bytes right.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.engine.vllm_scheduler import engine_config
from tests.simulation.options import Options
from tests.simulation.simulation import Mutation, Simulation, SimulationError
from tests.simulation.worker import CopyJobs
from xinference_xavier.engine import connector
from xinference_xavier.engine.adapters import Look, Unconfirmed
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.engine.worker_side import HostWorker
from xinference_xavier.pool import region
from xinference_xavier.pool.pool import Pool
from xinference_xavier.pool.region import COPY_THREADS
from xinference_xavier.replica import disk as replica_disk
from xinference_xavier.replica.disk import Disk

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
        {},
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
        {"resets": 0.15, "forgets": 0.0, "slots": 12, "arrivals": 0.6, "step_seconds": 0.01},
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
    "nobody looks whether an adapter's files have changed": (
        lambda patch: patch.setattr(Unconfirmed, "is_confirmed", True),
        ADAPTERS,
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
