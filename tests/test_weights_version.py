"""After a reset a replica shares with nobody until its weights version is set; then it shares only
with replicas of the same version."""

from collections.abc import Iterator

import pytest

from tests.harness.replicas import (
    ReplicaProcess,
    TrackerProcess,
    fresh_keys,
    replicas,
    stored,
    wait_until,
    wait_until_known,
)

pytestmark = pytest.mark.process

TIMEOUT = 30.0  # does not matter here
PREFIX = "namespace"


@pytest.fixture
def trio(tracker_process: TrackerProcess) -> Iterator[list[ReplicaProcess]]:
    transports = dict.fromkeys(("first", "second", "old"), "gloo")
    with replicas(tracker_process.address, transports) as started:
        yield started


def wait_alone(replica: ReplicaProcess) -> None:
    wait_until(lambda: replica.namespace().startswith(f"{PREFIX}+"), "it has left its namespace")
    wait_until(replica.is_up, "it is a member of a namespace of its own")


def test_replicas_of_the_same_weights_share_again(
    tracker_process: TrackerProcess, trio: list[ReplicaProcess]
) -> None:
    first, second, old = trio
    before, after = stored(old, first, count=3), fresh_keys(3)
    for replica in (first, second):
        replica.reset()
        wait_alone(replica)
    assert first.fetch("second", fresh_keys(1), TIMEOUT).reason == "donor gone"
    first.store(after)

    told = tracker_process.set_weights_version("2")

    assert {verdict: sorted(names) for verdict, names in told.items()} == {
        "joined": ["first", "second"],
        "not_reset": ["old"],
        "unreachable": [],
    }
    for replica in (first, second):
        replica.computed("short", 1.0)
    wait_until_known(second, first, after)
    assert second.fetch("first", after, TIMEOUT).committed == 3
    assert second.wrong_rows() == []
    assert second.holders(before[0]) == (), "no chunk from before comes back"
    assert old.holders(after[0]) == (), "a replica that was not reset gets nothing"


def test_another_reset_needs_another_version(
    tracker_process: TrackerProcess, trio: list[ReplicaProcess]
) -> None:
    """A version that was set before a reset says nothing about the weights after it."""
    first, second, _ = trio
    for replica in (first, second):
        replica.reset()
        wait_alone(replica)
    tracker_process.set_weights_version("2")
    assert first.namespace() == second.namespace() == f"{PREFIX}@2"
    second.reset()
    wait_alone(second)
    assert tracker_process.set_weights_version("3")["joined"] == ["second"]
    keys = fresh_keys(2)
    first.store(keys)
    assert second.namespace() == f"{PREFIX}@3"
    assert first.namespace() == f"{PREFIX}@2"
    wait_until(second.is_up, "it has joined")
    assert second.holders(keys[0]) == ()
    assert second.fetch("first", keys, TIMEOUT).reason == "donor gone"
