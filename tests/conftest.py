"""Fixtures that several test modules share."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import xoscar as xo
from hypothesis import settings

from examples.make_model import make_model
from tests.harness.api import ApiProcess, Pair
from tests.harness.remote import spawned
from tests.harness.replicas import TrackerProcess, replicas
from tests.tracker_pools import create_tracker

# No example has a time limit.
settings.register_profile("xavier", deadline=None)
settings.load_profile("xavier")

E2E = Path(__file__).parent / "e2e"
ENGINES = {E2E, *(Path(__file__).parent / name for name in ("models", "benchmarks", "chaos"))}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if E2E in item.path.parents:
            item.add_marker(pytest.mark.process)
        if item.get_closest_marker("process") and ENGINES.intersection(item.path.parents):
            item.add_marker(pytest.mark.engine)


def pytest_sessionfinish() -> None:
    """Save coverage data now: a pytest-xdist worker may be killed before its exit handlers run."""
    if "coverage" in sys.modules and (measuring := sys.modules["coverage"].Coverage.current()):
        measuring.save()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, made once per session."""
    return make_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def tracker_process() -> Iterator[TrackerProcess]:
    """A tracker in a process of its own, for all tests with replicas in processes of their own."""
    with TrackerProcess() as tracker:
        yield tracker


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    both = {"first": "gloo", "second": "gloo"}
    with ApiProcess() as api, replicas(api.address, both) as (first, second):
        yield Pair(api, first, second)


@pytest.fixture
async def pool() -> AsyncIterator[Any]:
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    yield pool
    await pool.stop()


@pytest.fixture
async def tracker(pool: Any) -> Any:
    return await create_tracker(pool.external_address)


@pytest.fixture
def stoppable_tracker() -> Iterator[TrackerProcess]:
    """One that the test may suspend or kill."""
    tracker = TrackerProcess(context=spawned(), lease=3600.0)  # however busy the machine is
    yield tracker
    tracker.kill()
