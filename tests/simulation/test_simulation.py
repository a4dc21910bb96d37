"""Whatever happens, every request reads what belongs to its own tokens, and nothing is left behind.

The runs are those of `Simulation`; see there how to repeat one. That they would notice is tested by
switching off what keeps the bytes right.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.config import VllmConfig

from tests.engine.vllm_scheduler import engine_config
from tests.simulation.options import Options
from tests.simulation.simulation import Mutation, Simulation, SimulationError
from tests.simulation.worker import CopyJobs
from xinference_xavier.engine import connector
from xinference_xavier.engine.manager import XavierManager
from xinference_xavier.pool.pool import Pool

RUNS = 40
LONG_TESTS, LONG_RUNS = 20, 150
ENOUGH = 30
"""Runs among which one notices each mutation."""


@pytest.fixture(scope="module")
def config(model_folder: Path) -> Iterator[VllmConfig]:
    logging.disable(logging.WARNING)  # vLLM tells of each engine that it makes
    yield engine_config(model_folder)
    logging.disable(logging.NOTSET)


def run(seed: int, config: VllmConfig, mutate: Mutation | None = None) -> int:
    """Returns the number of checked reads."""
    simulation = Simulation(Options(seed), config, mutate)
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
    told: list[list[str]] = [[], []]
    for events in told:
        simulation = Simulation(Options(7), config)
        simulation.on_event = events.append
        simulation.run()
    assert told[0] == told[1]


def _nothing(*_: object) -> None:
    pass


MUTATIONS: dict[str, Mutation] = {
    "stores are never voided": lambda patch: patch.setattr(XavierManager, "void_store", _nothing),
    "weights change unseen": lambda patch: patch.setattr(
        connector.XavierConnector, "_leave_weights", _nothing
    ),
    "the pool is not reset": lambda patch: patch.setattr(Pool, "reset", _nothing),
    "the fast path is always taken": lambda patch: patch.setattr(
        connector, "is_steady_decode", lambda _: True
    ),
    "nobody waits for copies of reused blocks": lambda patch: patch.setattr(
        CopyJobs, "wait", _nothing
    ),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutation_is_noticed(mutate: Mutation, config: VllmConfig) -> None:
    for seed in range(ENOUGH):
        try:
            run(seed, config, mutate)
        except SimulationError:
            return
    pytest.fail(f"{ENOUGH} runs did not notice it")
