"""What a peer has saved on the disk of its host is fetched through that peer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

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

NEVER = 30.0
ROWS = 16
CANARY = b"canary"


class Hosts(NamedTuple):
    """Two replicas, each with a disk of its own."""

    donor: ReplicaProcess
    consumer: ReplicaProcess

    def save(self, count: int) -> list[bytes]:
        """Fresh chunks that only the donor's disk has, as the consumer knows."""
        keys, name = stored(self.consumer, self.donor, count=count), self.donor.name
        self.donor.use([keys, keys])
        wait_until(lambda: self.holders(keys) == {name, f"{name}/disk"}, "they are saved")
        self.donor.evict(keys)
        wait_until(lambda: self.holders(keys) == {f"{name}/disk"}, "they have left the pool")
        return keys

    def knows(self, keys: list[bytes]) -> bool:
        """Whether the consumer knows what the donor's disk has."""
        return "donor/disk" in self.holders(keys)

    def holders(self, keys: list[bytes]) -> set[str]:
        """Who holds all of them, as the consumer knows."""
        return set.intersection(*(set(self.consumer.holders(key)) for key in keys))


@contextmanager
def with_disks(tracker: TrackerProcess, disks: Path, *names: str) -> Iterator[list[ReplicaProcess]]:
    options: dict[str, Any] = {"disk": str(disks), "disk_bytes": 1 << 30, "warm_join": 0.0}
    transports = dict.fromkeys(names, "gloo")
    with replicas(tracker.address, transports, rows=ROWS, **options) as started:
        for replica in started:
            replica.probed(CANARY, 1.0)
        yield started


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each replica has a folder of its name there."""
    return tmp_path_factory.mktemp("disks")


@pytest.fixture(scope="module")
def both(tracker_process: TrackerProcess, disks: Path) -> Iterator[Hosts]:
    with with_disks(tracker_process, disks, "donor", "consumer") as started:
        yield Hosts(*started)


@pytest.fixture
def hosts(both: Hosts) -> Hosts:
    """Their pools are empty."""
    for replica in both:
        replica.evict(replica.held())
    return both


def test_saved_chunks_are_fetched_through_their_peer(hosts: Hosts) -> None:
    keys = hosts.save(8)
    outcome = hosts.consumer.fetch("donor/disk", keys, NEVER)
    assert (outcome.state, outcome.committed) == ("COMMITTED", 8)
    assert hosts.consumer.wrong_rows() == []
    wait_until(lambda: hosts.holders(keys) == {"donor", "donor/disk"}, "its pool has them again")
    wait_until(lambda: is_free(hosts.donor), "the grant is released")
    fetches = hosts.consumer.stats()["fetches"]["by_transport"]
    assert fetches.keys() == {"gloo"}, "to the consumer it is a peer as any other"


def test_a_peer_evicts_nothing_for_another_s_fetch(hosts: Hosts) -> None:
    """It gives as many chunks as it has free rows, and the consumer knows that it has more."""
    keys = hosts.save(8)
    own = fresh_keys(ROWS - 3)
    hosts.donor.store(own)
    outcome = hosts.consumer.fetch("donor/disk", keys, NEVER)
    assert (outcome.reason, outcome.committed) == (None, 3)
    assert set(own) <= set(hosts.donor.held())
    assert hosts.holders(keys) == {"donor/disk"}
    outcome = hosts.consumer.fetch("donor/disk", keys[3:], NEVER)
    assert (outcome.reason, outcome.committed) == ("not held", 0)
    assert hosts.holders(keys) == {"donor/disk"}


def test_peers_that_ask_for_the_same_chunks_at_once_all_get_them(
    hosts: Hosts, tracker_process: TrackerProcess, disks: Path
) -> None:
    with with_disks(tracker_process, disks, "another") as (another,):
        for _ in range(5):
            keys = hosts.save(4)
            wait_until(partial(Hosts(hosts.donor, another).knows, keys), "the other one knows")
            for consumer in (hosts.consumer, another):
                consumer.begin_fetch("donor/disk", keys, NEVER)
            outcomes = [each.end_fetch() for each in (hosts.consumer, another)]
            assert [(each.reason, each.committed) for each in outcomes] == [(None, 4)] * 2
            wait_until(lambda: is_free(hosts.donor), "the grants are released")
            for replica in (*hosts, another):
                replica.evict(keys)


def test_chunks_that_left_the_disk_are_no_longer_expected_there(hosts: Hosts, disks: Path) -> None:
    keys = hosts.save(4)
    (rows,) = (disks / "donor").glob("*/rows")
    rows.write_bytes(bytes(rows.stat().st_size))
    outcome = hosts.consumer.fetch("donor/disk", keys, NEVER)
    assert (outcome.reason, outcome.committed) == ("not held", 0)
    wait_until(lambda: hosts.holders(keys) == set(), "the consumer knows")


def test_a_replica_that_starts_tells_what_its_disk_has(
    hosts: Hosts, tracker_process: TrackerProcess, disks: Path
) -> None:
    with with_disks(tracker_process, disks, "short-lived") as (first,):
        keys = Hosts(first, hosts.consumer).save(4)
    wait_until(lambda: hosts.holders(keys) == set(), "it has left")
    with with_disks(tracker_process, disks, "short-lived"):
        wait_until(lambda: hosts.holders(keys) == {"short-lived/disk"}, "what it can read again")
        assert hosts.consumer.fetch("short-lived/disk", keys, NEVER).committed == 4
