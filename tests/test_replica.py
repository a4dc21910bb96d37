"""Whatever dies or hangs: a fetch is decided by its deadline, no wrong row becomes a hit, every row
and every grant is free again, and the next fetch works."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.faults import ROWS_BEFORE_STALL
from tests.replica_process import (
    Outcome,
    ReplicaProcess,
    TrackerProcess,
    fresh_keys,
    replicas,
    wait_until,
)

STALLING = "tests.faults:StallingGloo"
ROWS = 8  # of each fetch here
NEVER = 30.0  # the deadline of a fetch that is to end before it
SHORT = 1.0  # the deadline of a fetch that is to end by it
GRACE = 1.0  # how much later its end may be noticed


class Scene(NamedTuple):
    stalling: ReplicaProcess  # as a donor, it sends a few rows and hangs
    plain: ReplicaProcess
    consumer: ReplicaProcess


@pytest.fixture(scope="module")
def scene(tracker_process: TrackerProcess) -> Iterator[Scene]:
    transports = {"stalling": STALLING, "plain": "gloo", "consumer": "gloo"}
    with replicas(tracker_process.address, transports, fetch_timeout=SHORT) as started:
        yield Scene(*started)


@contextmanager
def one_more(
    tracker: TrackerProcess, name: str, transport: str = "gloo"
) -> Iterator[ReplicaProcess]:
    """A replica for a test that does not leave it as it was."""
    with replicas(tracker.address, {name: transport}, fetch_timeout=SHORT) as (replica,):
        yield replica


def stored(consumer: ReplicaProcess, *donors: ReplicaProcess) -> list[bytes]:
    """Fresh chunks that all of `donors` hold, and `consumer` knows it."""
    keys = fresh_keys(ROWS)
    for donor in donors:
        donor.store(keys)
    names = {donor.name for donor in donors}
    wait_until(lambda: all(names <= set(consumer.holders(key)) for key in keys), "the index says")
    return keys


def begin_stalled_fetch(
    consumer: ReplicaProcess, donor: ReplicaProcess, keys: list[bytes], timeout: float
) -> None:
    """On return some rows have arrived and the others will not."""
    consumer.begin_fetch(donor.name, keys, timeout)
    wait_until(lambda: consumer.arrived() == ROWS_BEFORE_STALL, "some rows arrived")


def all_is_free(replica: ReplicaProcess) -> bool:
    counts = replica.counts()
    grants = replica.stats()["grants"]["live"]
    return (counts.filling, counts.pinned, counts.quarantined, grants) == (0, 0, 0, 0)


def assert_recovers(scene: Scene, outcome: Outcome, keys: list[bytes]) -> None:
    """After a fetch that went wrong: the rows come from another donor."""
    assert outcome.state == "ROLLED_BACK"
    wait_until(lambda: all_is_free(scene.consumer), "the rows are free again")
    wait_until(scene.consumer.is_up, "the consumer can fetch")
    missing = keys[outcome.committed :]
    assert not set(missing) & set(scene.consumer.held())
    assert scene.consumer.fetch("plain", missing, NEVER).committed == len(missing)
    assert scene.consumer.wrong_rows() == []


def test_a_stalled_donor(scene: Scene) -> None:
    keys = stored(scene.consumer, scene.stalling, scene.plain)
    outcome = scene.consumer.fetch("stalling", keys, SHORT)
    assert outcome.reason == "timeout"
    assert outcome.seconds < SHORT + GRACE
    assert_recovers(scene, outcome, keys)
    wait_until(lambda: all_is_free(scene.stalling), "the grant is released")


def test_a_donor_without_its_transfer_process(scene: Scene) -> None:
    """What had arrived whole from the start is kept."""
    keys = stored(scene.consumer, scene.stalling, scene.plain)
    begin_stalled_fetch(scene.consumer, scene.stalling, keys, NEVER)
    scene.stalling.send_signal(signal.SIGKILL, "transfer")
    outcome = scene.consumer.end_fetch()
    assert (outcome.reason, outcome.committed) == ("link", ROWS_BEFORE_STALL)
    assert outcome.seconds < NEVER
    assert_recovers(scene, outcome, keys)
    wait_until(lambda: all_is_free(scene.stalling), "the grant is released")
    wait_until(scene.stalling.is_up, "the donor's transfer process is back")
    few = stored(scene.consumer, scene.stalling)[:ROWS_BEFORE_STALL]
    assert scene.consumer.fetch("stalling", few, NEVER).committed == len(few)


def test_the_own_transfer_process_is_killed(scene: Scene) -> None:
    keys = stored(scene.consumer, scene.stalling, scene.plain)
    begin_stalled_fetch(scene.consumer, scene.stalling, keys, NEVER)
    restarts = scene.consumer.stats()["transfer_restarts"]
    scene.consumer.send_signal(signal.SIGKILL, "transfer")
    outcome = scene.consumer.end_fetch()
    assert (outcome.reason, outcome.committed) == ("transfer process died", 0)
    assert outcome.seconds < NEVER
    assert_recovers(scene, outcome, keys)
    assert scene.consumer.stats()["transfer_restarts"] == restarts + 1


def test_the_own_transfer_process_hangs(scene: Scene) -> None:
    """The request does not wait for it, but its rows do: it might still write them."""
    keys = stored(scene.consumer, scene.plain)
    scene.consumer.send_signal(signal.SIGSTOP, "transfer")
    outcome = scene.consumer.fetch("plain", keys, SHORT)
    assert outcome.reason == "timeout"
    assert outcome.seconds < SHORT + GRACE
    assert scene.consumer.counts().quarantined == ROWS
    assert_recovers(scene, outcome, keys)


@pytest.mark.parametrize("process", ["engine", "transfer"])
def test_a_donor_stands_still(scene: Scene, process: str) -> None:
    """After it served well, so that the consumer is connected to it already."""
    few = stored(scene.consumer, scene.stalling)[:ROWS_BEFORE_STALL]
    assert scene.consumer.fetch("stalling", few, NEVER).committed == len(few)
    keys = stored(scene.consumer, scene.stalling, scene.plain)
    transfer = psutil.Process(scene.stalling.stats()["transfer_pid"])
    scene.stalling.send_signal(signal.SIGSTOP, process)
    try:
        outcome = scene.consumer.fetch("stalling", keys, SHORT)
        assert outcome.reason == "timeout"
        assert outcome.seconds < SHORT + GRACE
        assert_recovers(scene, outcome, keys)
    finally:
        if process == "engine":
            scene.stalling.send_signal(signal.SIGCONT)
        else:
            transfer.resume()
    wait_until(lambda: all_is_free(scene.stalling), "the grant has ended")


def family(replica: ReplicaProcess) -> list[psutil.Process]:
    engine = psutil.Process(replica.process.pid)
    return [engine, *engine.children(recursive=True)]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    def alive() -> list[psutil.Process]:
        return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    wait_until(lambda: not alive(), "all processes are gone")


def assert_no_files_in_shared_memory(processes: list[psutil.Process]) -> None:
    """Its rows are in nobody's name, so nothing of them can be left."""
    for process in processes:
        assert "/dev/shm" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_donor_is_killed(scene: Scene, tracker_process: TrackerProcess) -> None:
    """The consumer recovers, and nothing is left of the donor."""
    with one_more(tracker_process, "victim", STALLING) as victim:
        keys = stored(scene.consumer, victim, scene.plain)
        processes = family(victim)
        assert len(processes) >= 2
        assert_no_files_in_shared_memory(processes)
        begin_stalled_fetch(scene.consumer, victim, keys, NEVER)
        victim.kill()
        outcome = scene.consumer.end_fetch()
        assert outcome.seconds < NEVER
        assert outcome.committed == ROWS_BEFORE_STALL
        assert_recovers(scene, outcome, keys)
        wait_until_gone(processes)


def test_a_consumer_is_killed_while_rows_are_granted_to_it(
    scene: Scene, tracker_process: TrackerProcess
) -> None:
    with one_more(tracker_process, "victim consumer") as victim:
        keys = stored(victim, scene.stalling)
        processes = family(victim)
        begin_stalled_fetch(victim, scene.stalling, keys, NEVER)
        assert scene.stalling.stats()["grants"]["live"] == 1
        assert scene.stalling.counts().pinned == ROWS
        victim.kill()
        wait_until(lambda: all_is_free(scene.stalling), "the grant has ended")
        wait_until_gone(processes)


def test_a_reset_while_rows_arrive(scene: Scene, tracker_process: TrackerProcess) -> None:
    """Nothing of before becomes a hit, and from then on the replica is among its own."""
    with one_more(tracker_process, "reset consumer") as consumer:
        own = fresh_keys(2)
        consumer.store(own)
        keys = stored(consumer, scene.stalling, scene.plain)
        wait_until(lambda: scene.plain.holders(own[0]) == (consumer.name,), "the index says")
        before = consumer.namespace()
        begin_stalled_fetch(consumer, scene.stalling, keys, SHORT)
        consumer.reset()
        assert consumer.held() == []
        assert consumer.counts().quarantined == ROWS, "their bytes may still come"
        outcome = consumer.end_fetch()
        assert (outcome.state, outcome.committed) == ("ROLLED_BACK", 0)
        wait_until(lambda: all_is_free(consumer), "the rows are free again")
        assert consumer.held() == []
        wait_until(lambda: consumer.namespace() not in ("", before), "it has another namespace")
        wait_until(lambda: scene.plain.holders(own[0]) == (), "it is gone from the old one")
        wait_until(consumer.is_up, "it is a member of the new one")
        consumer.store(own)
        assert consumer.holders(keys[0]) == ()
        assert consumer.fetch("plain", keys, SHORT).reason == "donor gone"
        assert scene.plain.holders(own[0]) == ()


def test_an_orderly_stop_leaves_nothing(scene: Scene, tracker_process: TrackerProcess) -> None:
    with one_more(tracker_process, "leaving") as leaving:
        keys = stored(scene.consumer, leaving)
        processes = family(leaving)
    wait_until(lambda: all(scene.consumer.holders(key) == () for key in keys), "it has left")
    wait_until_gone(processes)
