"""What several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.make_model import make_model
from tests.api_process import ApiProcess
from tests.pair import Pair
from tests.replica_process import TrackerProcess, replicas


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, made once a session."""
    return make_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def tracker_process() -> Iterator[TrackerProcess]:
    """A tracker in a process of its own, for all tests with replicas in processes of their own."""
    tracker = TrackerProcess()
    yield tracker
    tracker.kill()


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    api = ApiProcess()
    try:
        with replicas(api.address, {"first": "gloo", "second": "gloo"}) as (first, second):
            yield Pair(api, first, second)
    finally:
        api.kill()
