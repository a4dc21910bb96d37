"""Whatever dies or hangs, a fetch ends by its deadline, no wrong row becomes a hit, every row and
grant is freed, and the next fetch works."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import xoscar

from tests.faults import ROWS_BEFORE_STALL
from tests.harness.processes import wait_gone
from tests.harness.replicas import (
    DEADLINE,
    Outcome,
    ReplicaProcess,
    TrackerProcess,
    is_free,
    replicas,
    stored,
    wait_until,
)
from xinference_xavier.protocol.transfer import PROTOCOL_VERSION, GrantRequest
from xinference_xavier.runtime.addresses import replica_uid

pytestmark = pytest.mark.process

STALLING = "tests.faults:StallingGloo"
ROWS = 8  # per fetch, as many as `stored` makes
NEVER = 30.0  # deadline of a fetch that should end earlier
SHORT = 1.0  # deadline of a fetch that should end by it
GRACE = 1.0  # until its end is noticed


class Scene(NamedTuple):
    stalling: ReplicaProcess  # as a donor it sends a few rows and hangs
    plain: ReplicaProcess
    consumer: ReplicaProcess


@pytest.fixture(scope="module")
def scene(tracker_process: TrackerProcess) -> Iterator[Scene]:
    transports = {"stalling": STALLING, "plain": "gloo", "consumer": "gloo"}
    with replicas(tracker_process.address, transports, fetch_timeout=SHORT) as started:
        yield Scene(*started)


@contextmanager
def extra_replica(tracker: TrackerProcess, name: str, transport: str) -> Iterator[ReplicaProcess]:
    """A replica for a test that changes it for good."""
    with replicas(tracker.address, {name: transport}, fetch_timeout=SHORT) as (replica,):
        yield replica


def begin_stalled_fetch(
    consumer: ReplicaProcess, donor: ReplicaProcess, keys: list[bytes], timeout: float
) -> None:
    """Return when some rows have arrived; the others never will."""
    consumer.begin_fetch(donor.name, keys, timeout)
    wait_until(lambda: consumer.arrived() == ROWS_BEFORE_STALL, "some rows arrived")


def assert_recovers(scene: Scene, outcome: Outcome, keys: list[bytes]) -> None:
    """After a failed fetch, another donor brings the rows."""
    assert outcome.state == "ROLLED_BACK"
    wait_until(lambda: is_free(scene.consumer), "the rows are free again")
    wait_until(scene.consumer.is_up, "the consumer can fetch")
    missing = keys[outcome.committed :]
    assert not set(missing) & set(scene.consumer.held())
    assert scene.consumer.fetch("plain", missing, NEVER).committed == len(missing)
    assert scene.consumer.wrong_rows() == []


def test_a_donor_without_its_transfer_process(scene: Scene) -> None:
    """The leading rows that arrived are kept."""
    keys = stored(scene.consumer, scene.stalling, scene.plain)
    begin_stalled_fetch(scene.consumer, scene.stalling, keys, NEVER)
    scene.stalling.send_signal(signal.SIGKILL, "transfer")
    outcome = scene.consumer.end_fetch()
    assert (outcome.reason, outcome.committed) == ("link", ROWS_BEFORE_STALL)
    assert outcome.seconds < NEVER
    assert_recovers(scene, outcome, keys)
    wait_until(lambda: is_free(scene.stalling), "the grant is released")
    wait_until(scene.stalling.is_up, "the donor's transfer process is back")
    few = stored(scene.consumer, scene.stalling)[:ROWS_BEFORE_STALL]
    assert scene.consumer.fetch("stalling", few, NEVER).committed == len(few)


def listed(consumer: ReplicaProcess, keys: list[bytes], *donors: str) -> bool:
    return all(consumer.all_holders(key) == donors for key in keys)


def offered(consumer: ReplicaProcess, keys: list[bytes], *donors: str) -> bool:
    return all(consumer.holders(key) == donors for key in keys)


def test_a_donor_is_not_asked_while_it_has_no_transfer_process(scene: Scene) -> None:
    """It serves again with the next request."""
    keys = stored(scene.consumer, scene.plain)
    scene.plain.send_signal(signal.SIGKILL, "transfer")
    wait_until(lambda: offered(scene.consumer, keys), "nobody can be asked")
    assert listed(scene.consumer, keys, "plain")
    wait_until(lambda: offered(scene.consumer, keys, "plain"), "it can be asked again")
    assert scene.consumer.fetch("plain", keys, NEVER).reason is None


def test_the_consumer_s_transfer_process_is_killed(scene: Scene) -> None:
    keys = stored(scene.consumer, scene.stalling, scene.plain)
    begin_stalled_fetch(scene.consumer, scene.stalling, keys, NEVER)
    restarts = scene.consumer.stats()["transfer_restarts"]
    scene.consumer.send_signal(signal.SIGKILL, "transfer")
    outcome = scene.consumer.end_fetch()
    assert (outcome.reason, outcome.committed) == ("transfer process died", 0)
    assert outcome.seconds < NEVER
    assert_recovers(scene, outcome, keys)
    assert scene.consumer.stats()["transfer_restarts"] == restarts + 1


def test_the_consumer_s_transfer_process_hangs(scene: Scene) -> None:
    """The request does not wait for it. The rows do, because it may still write them."""
    keys = stored(scene.consumer, scene.plain)
    scene.consumer.send_signal(signal.SIGSTOP, "transfer")
    outcome = scene.consumer.fetch("plain", keys, SHORT)
    assert outcome.reason == "timeout"
    assert outcome.seconds < SHORT + GRACE
    assert scene.consumer.counts().quarantined == ROWS
    assert_recovers(scene, outcome, keys)


@pytest.mark.parametrize("process", ["engine", "transfer"])
def test_a_donor_is_suspended(scene: Scene, process: str) -> None:
    """A link to it is open, because it has served a fetch before."""
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
    wait_until(lambda: is_free(scene.stalling), "the grant has ended")


def family(replica: ReplicaProcess) -> list[psutil.Process]:
    engine = psutil.Process(replica.process.pid)
    return [engine, *engine.children(recursive=True)]


def assert_no_files_in_shared_memory(processes: list[psutil.Process]) -> None:
    """The region has no name, so nothing of it can be left."""
    for process in processes:
        assert "/dev/shm" not in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_donor_is_killed(scene: Scene, tracker_process: TrackerProcess) -> None:
    """The consumer recovers, and no process of the donor is left."""
    with extra_replica(tracker_process, "victim", STALLING) as victim:
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
        wait_gone(processes)
    assert "victim" not in scene.consumer.transfer_stats()["linked_to"]


def test_a_killed_consumers_grants_end_with_its_lease(tracker_process: TrackerProcess) -> None:
    """Long before the grants expire."""
    transports = {"patient donor": STALLING, "victim consumer": "gloo"}
    with replicas(tracker_process.address, transports, fetch_timeout=10 * DEADLINE) as started:
        donor, victim = started
        keys = stored(victim, donor)
        processes = family(victim)
        begin_stalled_fetch(victim, donor, keys, 10 * DEADLINE)
        assert donor.stats()["grants"] == 1
        assert donor.counts().pinned == ROWS
        victim.kill()
        wait_until(lambda: is_free(donor), "the grant has ended")
        wait_gone(processes)


async def test_a_grant_that_nobody_releases_ends_by_its_expiry(scene: Scene) -> None:
    """Its consumer may be healthy, as a release can be lost."""
    keys = stored(scene.consumer, scene.plain)
    donor = await xoscar.actor_ref(scene.consumer.address("plain"), replica_uid("plain"))
    request = GrantRequest(PROTOCOL_VERSION, "namespace", "consumer", 1, tuple(keys), False)
    await donor.grant(request)
    assert scene.plain.counts().pinned == ROWS
    wait_until(lambda: is_free(scene.plain), "the grant has expired")
    assert scene.plain.address("consumer") is not None, "its lease has not expired"
    await donor.release("consumer", 1)  # too late, which does no harm
    assert is_free(scene.plain)


def regions(replica: ReplicaProcess) -> int:
    """How many regions its engine has mapped."""
    maps = Path(f"/proc/{replica.pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if "memfd:xavier-region" in line})


def test_a_neighbours_rows_are_copied_if_workers_do_not_map_them() -> None:
    """Neither a link nor the donor's transfer process has a part in it. Its memory goes with it."""
    transports = {"near": "shared_memory", "own": "shared_memory"}
    with TrackerProcess() as tracker, replicas(tracker.address, transports) as (near, own):
        wait_until(lambda: own.linked_to() == {"near": "shared_memory"}, "its memory is mapped")
        keys = stored(own, near)
        assert own.fetch("near", keys, NEVER)[:3] == ("COMMITTED", None, len(keys))
        assert own.wrong_rows() == []
        assert [*own.stats()["fetches"]["by_transport"]] == ["shared_memory"]
        assert own.obstacles() == {"near": "a worker takes no orders"}
        assert regions(own) == 2
        near.kill()
        wait_until(lambda: regions(own) == 1, "its memory is unmapped")


def test_an_orderly_stop_leaves_nothing(scene: Scene, tracker_process: TrackerProcess) -> None:
    with extra_replica(tracker_process, "leaving", "gloo") as leaving:
        keys = stored(scene.consumer, leaving)
        processes = family(leaving)
    wait_until(lambda: all(scene.consumer.holders(key) == () for key in keys), "it has left")
    wait_gone(processes)
