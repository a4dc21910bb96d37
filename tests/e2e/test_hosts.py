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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.local_cluster import Completion
from tests.e2e.conftest import ROOT
from tests.e2e.model import CHUNK, Model, question, wait_until
from tests.harness.clusters import REST_PORT, SUPERVISOR, SUPERVISOR_PORT, WORKER_PORT, HostCluster
from tests.harness.hosts import Admitted, Hosts
from xinference_xavier.runtime.addresses import split_address

pytestmark = pytest.mark.long

FIRST, SECOND = WORKERS = ("first", "second")
PORTS = range(23000, 23012)
OPTIONS = {
    "xavier_port_range": f"{PORTS[0]}-{PORTS[-1]}",
    "xavier_pool_bytes": "1GiB",  # everything that these tests compute
}
TIMEOUT = 5.0  # xavier_fetch_timeout's default
LEASE = 10.0
MEGABITS = 160
"""A link so slow that the document takes about 2.5 s, half of the time limit."""
MIDWAY_BYTES = 8 << 20
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), timeout=2)"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Hosts with firewalls. Workers reach each other only on `xavier_port_range` and, for Gloo, the
    ephemeral ports. In addition, xinference 4.1 needs:

    - from workers to the supervisor's host: its REST port (at start, and after the supervisor was
      lost) and its actor port, which the trackers share;
    - from the supervisor to a worker's host: the worker's port, `xavier_port_range`, on which the
      tracker asks replicas for figures, and each model process's, which is any ephemeral port.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [(low, high), (PORTS[0], PORTS[-1])]
    with Hosts(SUPERVISOR, *WORKERS) as hosts:
        us, supervisor, *workers = hosts.our_address, *map(hosts.address, (SUPERVISOR, *WORKERS))
        hosts.admit_only(
            SUPERVISOR, [Admitted(each, REST_PORT, SUPERVISOR_PORT) for each in (us, *workers)]
        )
        # The tests ask model processes too, like the supervisor's REST process.
        for worker in WORKERS:
            hosts.admit_only(
                worker,
                [
                    *(Admitted(each, WORKER_PORT, WORKER_PORT) for each in (us, supervisor)),
                    *(
                        Admitted(each, *span)
                        for each in {us, supervisor, *workers} - {hosts.address(worker)}
                        for span in ports
                    ),
                ],
            )
        yield hosts


@pytest.fixture(scope="module")
def cluster(hosts: Hosts, model_folder: Path) -> Iterator[HostCluster]:
    log = ROOT / "build" / "test-hosts.log"
    with HostCluster(log, hosts, workers=WORKERS) as cluster:
        cluster.register(model_folder, "small")
        yield cluster


@pytest.fixture(scope="module")
def model(cluster: HostCluster) -> Model:
    model = Model(cluster, "hosts")
    model.launch(**OPTIONS)
    return model


def replica_at(model: Model, host: str) -> dict[str, Any]:
    """The tracker's entry for the replica on that host."""
    worker = model.cluster.workers[host]
    (name,) = (
        status["replica_model_uid"]
        for status in model.cluster.replicas(model.uid)
        if status["worker_address"] == worker
    )
    return model.replicas()[name]


def at(model: Model, host: str) -> str:
    return str(replica_at(model, host)["replica"])


def decided(replica: dict[str, Any]) -> int:
    """How many of a replica's fetches have ended."""
    fetches: dict[str, Any] = replica["fetches"]
    rolled_back: dict[str, int] = fetches["rolled_back"]
    return sum(rolled_back.values(), start=int(fetches["committed"]))


def share(model: Model, donor: str, consumer: str, seed: int) -> Completion:
    return model.share(at(model, donor), at(model, consumer), question(seed))


def test_replicas_tell_their_peers_their_hosts_own_addresses(model: Model, hosts: Hosts) -> None:
    addresses = [split_address(each["address"]) for each in model.replicas().values()]
    assert sorted(host for host, _ in addresses) == sorted(map(hosts.address, WORKERS))
    assert all(port in PORTS for _, port in addresses)


@pytest.mark.parametrize(("donor", "consumer"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_what_one_host_computed_the_other_fetches_through_both_firewalls(
    model: Model, hosts: Hosts, donor: str, consumer: str
) -> None:
    """Between the two, only `xavier_port_range` and the ephemeral ports are open."""
    seed = 400 + WORKERS.index(donor)
    before = replica_at(model, consumer)
    left = hosts.sent(donor)
    hit = share(model, donor, consumer, seed)
    after = replica_at(model, consumer)
    bytes_hit = hit.cached_tokens // CHUNK * before["pool"]["row_bytes"]
    assert after["bytes_received"] == before["bytes_received"] + bytes_hit
    assert hosts.sent(donor) - left > bytes_hit
    assert after["transport"] == "gloo", "hosts share no memory"
    alone = model.ask(after["replica"], question(seed), cache_salt="alone")
    assert alone.cached_tokens == 0
    assert alone.tokens == hit.tokens


def test_the_firewalls_admit_nothing_else(model: Model, hosts: Hosts) -> None:
    """Otherwise the test above would say nothing about ports."""
    _, engine_port = split_address(replica_at(model, FIRST)["address"])
    assert reaches_first(hosts, SECOND, engine_port)
    assert not reaches_first(hosts, SECOND, WORKER_PORT)
    assert reaches_first(hosts, SUPERVISOR, WORKER_PORT)


def reaches_first(hosts: Hosts, source: str, port: int) -> bool:
    words = [sys.executable, "-c", CONNECT, hosts.address(FIRST), str(port)]
    return hosts.run(source, words, stderr=subprocess.DEVNULL).wait() == 0


@pytest.mark.parametrize("seconds", [1, 5, 30])
def test_a_cut_in_the_middle_of_a_transfer_costs_a_recomputation_at_most(
    model: Model, hosts: Hosts, seconds: int
) -> None:
    """The donor's link is down for a while. The consumer's answer is right and in time, and once
    the link is back there are hits again without intervention. After a cut longer than the lease,
    the tracker drops the donor, which rejoins as the same incarnation."""
    seed = 410 + seconds
    both = model.incarnations()
    cold = model.compute(at(model, FIRST), question(seed))
    before = replica_at(model, SECOND)
    document_bytes = cold.prompt_tokens // CHUNK * before["pool"]["row_bytes"]
    with ThreadPoolExecutor(1) as client, hosts.slow(FIRST, MEGABITS):
        left = hosts.sent(FIRST)
        asking = client.submit(model.answer, before["replica"], question(seed))
        wait_until(lambda: hosts.sent(FIRST) - left > MIDWAY_BYTES, "the transfer is on its way")
        with hosts.cut(FIRST):
            cut_at = time.monotonic()
            assert hosts.sent(FIRST) - left < document_bytes
            if seconds > LEASE:
                wait_until(lambda: model.is_sharing(1), "the donor's lease has ended")
            threading.Event().wait(cut_at + seconds - time.monotonic())
    answer = asking.result()
    assert answer.tokens == cold.tokens
    assert answer.seconds < TIMEOUT + 10 * cold.seconds  # decided by the deadline, then computed
    after = replica_at(model, SECOND)
    assert decided(after) == decided(before) + 1
    if seconds >= TIMEOUT:
        assert after["fetches"]["committed"] == before["fetches"]["committed"]

    wait_until(model.is_sharing, "both are members")
    assert model.incarnations() == both
    share(model, FIRST, SECOND, seed + 100)
    share(model, SECOND, FIRST, seed + 200)


def test_a_host_reads_the_other_by_nixl(model: Model) -> None:
    """Over TCP here, through both firewalls."""
    model.cluster.terminate(model.uid)
    model.launch(**OPTIONS, xavier_transport="nixl")
    share(model, FIRST, SECOND, 440)
    share(model, SECOND, FIRST, 441)
    for worker in WORKERS:
        replica = replica_at(model, worker)
        assert (replica["transport"], replica["fetches"]["rolled_back"]) == ("nixl", {})


def test_a_host_lost_for_good_is_forgotten_and_the_other_answers(
    model: Model, cluster: HostCluster
) -> None:
    """Last in this module, because it costs a host."""
    lost, left = at(model, FIRST), at(model, SECOND)
    cold = model.compute(lost, question(450))
    cluster.lose(FIRST)
    answer = model.answer(left, question(450))
    assert answer.tokens == cold.tokens
    assert answer.seconds < TIMEOUT + 10 * cold.seconds
    wait_until(lambda: [*model.replicas()] == [left], "the lost replica's lease ended")
    assert model.status()["totals"]["holdings"] == model.replicas()[left]["holdings"]
    assert model.answer(left, question(451)).cached_tokens == 0
