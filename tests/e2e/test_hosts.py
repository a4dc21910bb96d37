"""Level 5: xinference over three hosts with addresses and firewalls of their own.

A supervisor and two workers with one replica each. Whatever happens to the network between them, a
request that reaches a replica gets the right answer, within the fetch timeout plus the time to
compute it.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.local_cluster import Completion
from tests.e2e.asking import CHUNK, published, question
from tests.e2e.conftest import ARGUMENTS, ROOT, can_fetch, wait_for_engine, wait_until
from tests.harness.clusters import (
    SUPERVISOR,
    WORKER_PORT,
    HostCluster,
    allow_only_what_is_needed,
)
from tests.harness.hosts import Hosts
from xinference_xavier.runtime.addresses import split_address

pytestmark = pytest.mark.long

UID = "hosts"
FIRST, SECOND = WORKERS = ("first", "second")
PORTS = range(23000, 23012)
TIMEOUT = 5.0  # xavier_fetch_timeout's default
LEASE = 10.0
MEGABITS = 160
"""A link so slow that the document takes about 2.5 s, half of the time limit."""
MIDWAY_BYTES = 8 << 20
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), timeout=2)"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(SUPERVISOR, *WORKERS) as hosts:
        allow_only_what_is_needed(hosts, WORKERS, PORTS)
        yield hosts


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, model_folder: Path) -> Iterator[HostCluster]:
    log = ROOT / "build" / "test-hosts.log"
    with HostCluster(log, hosts, workers=WORKERS) as cluster:
        cluster.register(model_folder, "small")
        launch(cluster)
        yield cluster


def launch(cluster: HostCluster, **options: str) -> None:
    # The pools hold everything that these tests compute.
    options |= {"xavier_port_range": f"{PORTS[0]}-{PORTS[-1]}", "xavier_pool_bytes": "1GiB"}
    cluster.launch("small", UID, replica=2, **ARGUMENTS | options)
    wait_for_engine(lambda: can_fetch(cluster, UID, 2), "both replicas can fetch")


def replica_at(cluster: HostCluster, hosts: Hosts, name: str) -> dict[str, Any]:
    """The tracker's entry for the replica on that host."""
    found: list[dict[str, Any]] = [
        replica
        for replica in cluster.members(UID).values()
        if split_address(replica["address"])[0] == hosts.address(name)
    ]
    (replica,) = found
    return replica


def decided(replica: dict[str, Any]) -> int:
    """How many of a replica's fetches have ended."""
    fetches: dict[str, Any] = replica["fetches"]
    rolled_back: dict[str, int] = fetches["rolled_back"]
    return sum(rolled_back.values(), start=int(fetches["committed"]))


def compute(cluster: HostCluster, hosts: Hosts, name: str, seed: int) -> Completion:
    """Have the replica on that host compute a document; return when it has published it."""
    _, cold = published(
        cluster,
        UID,
        lambda: cluster.complete_at(name, UID, question(seed)),
        by=replica_at(cluster, hosts, name)["incarnation"],
    )
    return cold


def share(cluster: HostCluster, hosts: Hosts, donor: str, consumer: str, seed: int) -> Completion:
    """A remote hit: the consumer's answer with all whole chunks from the donor."""
    cold = compute(cluster, hosts, donor, seed)
    hit = cluster.complete_at(consumer, UID, question(seed))
    assert cold.cached_tokens == 0
    assert hit.cached_tokens == cold.prompt_tokens // CHUNK * CHUNK
    assert hit.tokens == cold.tokens
    return hit


def test_replicas_tell_their_peers_their_hosts_own_addresses(
    cluster: HostCluster, hosts: Hosts
) -> None:
    found = cluster.members(UID).values()
    addresses = [split_address(replica["address"]) for replica in found]
    assert sorted(host for host, _ in addresses) == sorted(map(hosts.address, WORKERS))
    assert all(port in PORTS for _, port in addresses)


@pytest.mark.parametrize(("donor", "consumer"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_what_one_host_computed_the_other_fetches_through_both_firewalls(
    cluster: HostCluster, hosts: Hosts, donor: str, consumer: str
) -> None:
    """Between the two, only `xavier_port_range` and the ephemeral ports are open."""
    seed = 400 + WORKERS.index(donor)
    before = replica_at(cluster, hosts, consumer)
    left = hosts.sent(donor)
    hit = share(cluster, hosts, donor, consumer, seed)
    bytes_hit = hit.cached_tokens // CHUNK * before["pool"]["row_bytes"]
    wait_until(
        lambda: (
            replica_at(cluster, hosts, consumer)["bytes_received"]
            == before["bytes_received"] + bytes_hit
        ),
        "the consumer has counted the bytes",
    )
    assert hosts.sent(donor) - left > bytes_hit
    by_gloo = replica_at(cluster, hosts, consumer)
    assert by_gloo["transport"] == "gloo", "hosts share no memory"
    alone = cluster.complete_at(consumer, UID, question(seed), cache_salt="alone")
    assert alone.cached_tokens == 0
    assert alone.tokens == hit.tokens


def test_the_firewalls_admit_nothing_else(cluster: HostCluster, hosts: Hosts) -> None:
    """Otherwise the test above would say nothing about ports."""
    _, engine_port = split_address(replica_at(cluster, hosts, FIRST)["address"])
    assert reaches(hosts, SECOND, FIRST, engine_port)
    assert not reaches(hosts, SECOND, FIRST, WORKER_PORT)
    assert reaches(hosts, SUPERVISOR, FIRST, WORKER_PORT)


def reaches(hosts: Hosts, source: str, target: str, port: int) -> bool:
    words = [sys.executable, "-c", CONNECT, hosts.address(target), str(port)]
    return hosts.run(source, words, stderr=subprocess.DEVNULL).wait() == 0


@pytest.mark.parametrize("seconds", [1, 5, 30])
def test_a_cut_in_the_middle_of_a_transfer_costs_a_recomputation_at_most(
    cluster: HostCluster, hosts: Hosts, seconds: int
) -> None:
    """The donor's link is down for a while. The consumer's answer is right and in time, and once
    the link is back there are hits again without intervention. After a cut longer than the lease,
    the tracker drops the donor, which rejoins as the same incarnation."""
    seed = 410 + seconds
    both = cluster.members(UID).keys()
    cold = compute(cluster, hosts, FIRST, seed)
    before = replica_at(cluster, hosts, SECOND)
    document_bytes = cold.prompt_tokens // CHUNK * before["pool"]["row_bytes"]
    answers: list[Completion] = []
    asking = threading.Thread(
        target=lambda: answers.append(cluster.complete_at(SECOND, UID, question(seed)))
    )
    with hosts.slow(FIRST, MEGABITS):
        left = hosts.sent(FIRST)
        asking.start()
        wait_until(lambda: hosts.sent(FIRST) - left > MIDWAY_BYTES, "the transfer is on its way")
        with hosts.cut(FIRST):
            cut_at = time.monotonic()
            assert hosts.sent(FIRST) - left < document_bytes
            if seconds > LEASE:
                wait_until(lambda: can_fetch(cluster, UID, 1), "the donor's lease has ended")
            threading.Event().wait(cut_at + seconds - time.monotonic())
    asking.join()
    (answer,) = answers
    assert answer.tokens == cold.tokens
    assert answer.seconds < TIMEOUT + 10 * cold.seconds  # decided by the deadline, then computed
    after = replica_at(cluster, hosts, SECOND)
    assert decided(after) == decided(before) + 1
    if seconds >= TIMEOUT:
        assert after["fetches"]["committed"] == before["fetches"]["committed"]

    wait_until(lambda: can_fetch(cluster, UID, 2), "both are members")
    assert cluster.members(UID).keys() == both
    share(cluster, hosts, FIRST, SECOND, seed + 100)
    share(cluster, hosts, SECOND, FIRST, seed + 200)


def test_a_host_reads_the_other_by_nixl(cluster: HostCluster, hosts: Hosts) -> None:
    """Over TCP here, through both firewalls."""
    cluster.terminate(UID)
    launch(cluster, xavier_transport="nixl")
    share(cluster, hosts, FIRST, SECOND, 440)
    share(cluster, hosts, SECOND, FIRST, 441)
    for worker in WORKERS:
        replica = replica_at(cluster, hosts, worker)
        assert (replica["transport"], replica["fetches"]["rolled_back"]) == ("nixl", {})


def test_a_host_lost_for_good_is_forgotten_and_the_other_answers(
    cluster: HostCluster, hosts: Hosts
) -> None:
    """Last in this module, because it costs a host."""
    cold = compute(cluster, hosts, FIRST, 450)
    cluster.lose(FIRST)
    answer = cluster.complete_at(SECOND, UID, question(450))
    assert answer.tokens == cold.tokens
    assert answer.seconds < TIMEOUT + 10 * cold.seconds
    wait_until(lambda: len(cluster.xavier(UID)["replicas"]) == 1, "the lost replica's lease ended")
    (left,) = cluster.xavier(UID)["replicas"]
    assert split_address(left["address"])[0] == hosts.address(SECOND)
    assert cluster.xavier(UID)["totals"]["holdings"] == left["holdings"]
    again = cluster.complete_at(SECOND, UID, question(451))
    assert again.cached_tokens == 0
