"""Replicas over NIXL, by TCP: a donor that stops in the middle of a read or dies, a consumer that
dies, and strangers cost at most a transfer process; no late byte meets a row that was reused."""

from collections.abc import Iterator
from typing import NamedTuple

import psutil
import pytest

from tests.harness.processes import frozen
from tests.harness.replicas import (
    ReplicaProcess,
    TrackerProcess,
    fresh_keys,
    is_free,
    replicas,
    stored,
    wait_until,
)

pytestmark = pytest.mark.process

SHORT = 2.0  # seconds: the deadline of a fetch that should end by it
LONG = 10.0  # the deadline of a fetch that should end earlier


class Scene(NamedTuple):
    donor: ReplicaProcess
    consumer: ReplicaProcess


@pytest.fixture(scope="module")
def scene(tracker_process: TrackerProcess) -> Iterator[Scene]:
    transports = {"giving": "nixl", "taking": "nixl"}
    with replicas(tracker_process.address, transports, fetch_timeout=LONG) as started:
        yield Scene(*started)


def assert_they_share(scene: Scene) -> None:
    wait_until(lambda: scene.donor.is_up() and scene.consumer.is_up(), "both can move rows")
    wait_until(lambda: is_free(scene.donor), "its grants have ended")
    keys = stored(scene.consumer, scene.donor, count=4)
    outcome = scene.consumer.fetch(scene.donor.name, keys, LONG)
    assert (outcome.reason, outcome.committed) == (None, 4)
    assert scene.consumer.wrong_rows() == []


def restarts(replica: ReplicaProcess) -> int:
    count: int = replica.stats()["transfer_restarts"]
    return count


def test_a_read_that_does_not_end_ends_with_its_process(scene: Scene) -> None:
    """NIXL cannot take a read back: the rows are not used before nobody writes them."""
    assert_they_share(scene)  # by a link that stays
    before = restarts(scene.consumer)
    keys = stored(scene.consumer, scene.donor)
    transfer = psutil.Process(scene.donor.stats()["transfer_pid"])
    with frozen([transfer]):
        outcome = scene.consumer.fetch(scene.donor.name, keys, SHORT)
        assert (outcome.reason, outcome.committed) == ("timeout", 0), "the request goes on"
        assert scene.consumer.counts().quarantined == len(keys)
        assert restarts(scene.consumer) == before
        wait_until(lambda: restarts(scene.consumer) > before, "another process has started")
        assert is_free(scene.consumer)
        others = fresh_keys(scene.consumer.counts().rows)
        assert scene.consumer.store(others) == len(others), "every slot is reused"
    assert_they_share(scene)
    wait_until(lambda: len(scene.consumer.held()) >= len(others), "all have their checksums")
    assert scene.consumer.wrong_rows() == []
