"""A process that is not one of the model's replicas gets no row, whatever it sends and to whichever
port; the replicas go on sharing."""

import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import psutil
import pytest
import xoscar

from tests.harness.replicas import (
    MODEL,
    ROW_BYTES,
    ReplicaProcess,
    TrackerProcess,
    replicas,
    stored,
    wait_until,
)
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.tracker import Member, Settings, tracker_uid
from xinference_xavier.protocol.transfer import PROTOCOL_VERSION, TRANSFER_UID, prove
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.transfer.transports.gloo import GlooTransport

pytestmark = pytest.mark.process

HOST = "127.0.0.1"
PATIENCE = 30.0
ROWS = 4


class Scene(NamedTuple):
    donor: ReplicaProcess
    consumer: ReplicaProcess


@pytest.fixture(scope="module")
def scene(tracker_process: TrackerProcess) -> Iterator[Scene]:
    transports = {"guarded": "auto", "friend": "gloo"}
    with replicas(tracker_process.address, transports, fetch_timeout=PATIENCE) as started:
        yield Scene(*started)


def assert_they_share(scene: Scene) -> None:
    keys = stored(scene.consumer, scene.donor, count=ROWS)
    outcome = scene.consumer.fetch("guarded", keys, PATIENCE)
    assert (outcome.reason, outcome.committed) == (None, ROWS)
    assert scene.consumer.wrong_rows() == []


async def test_a_link_of_a_non_member_is_closed(
    scene: Scene, tracker_process: TrackerProcess
) -> None:
    """It may have been a member: a replica that the tracker dropped learns of it late."""
    tracker = await xoscar.actor_ref(tracker_process.address, tracker_uid(MODEL))
    late = Member("late", f"{HOST}:1")
    secret = (await tracker.join("elsewhere", late, Settings())).secret
    await tracker.leave("elsewhere", "late")
    address = scene.consumer.address(scene.donor.name)
    engine = await xoscar.actor_ref(address, replica_uid(scene.donor.name))
    transfer = await xoscar.actor_ref((await engine.transfer_endpoint()).address, TRANSFER_UID)
    assert_they_share(scene)  # this opens a link that stays
    links = scene.donor.transfer_stats()["links"]
    region = Region.create(ROWS, ROW_BYTES)
    transport = GlooTransport(region, HOST, None)
    offer = transport.offer(time.monotonic() + PATIENCE)
    proof = prove(secret, "link")
    answer = await transfer.open_link(
        PROTOCOL_VERSION, "link", proof, ROW_BYTES, "late", "gloo", offer.hello, PATIENCE
    )
    link = offer.complete(answer, time.monotonic() + PATIENCE)
    assert scene.donor.transfer_stats()["links"] == links + 1
    wait_until(lambda: scene.donor.transfer_stats()["links"] == links, "the link is closed")
    assert_they_share(scene)
    link.close()
    region.close()


def ports(pid: int) -> list[int]:
    sockets = psutil.Process(pid).net_connections("tcp")
    return [s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN]


def noises() -> Iterator[bytes]:
    """Bytes that xoscar and Gloo might take for the beginning of a message, and others."""
    source = random.Random(0)
    yield b""
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield struct.pack("<BQH", 1, 1 << 50, 0) + b"x"  # a header of an impossibly large message
    yield struct.pack("<BQH", 1, 100, 0) + source.randbytes(100)
    yield struct.pack("<Q", 0)
    for size in (1, 7, 8, 9, 100, 10_000):
        yield source.randbytes(size)


def test_noise_on_any_port_disturbs_nobody(scene: Scene) -> None:
    """Connections send nothing, nonsense or unfinished messages; half of them stay open."""
    donor = scene.donor
    pids = [donor.process.pid, donor.stats()["transfer_pid"]]
    knocked = [port for pid in pids for port in ports(pid)]
    assert len(knocked) == 3, "xoscar's ports of both processes, and Gloo's"
    restarts = donor.stats()["transfer_restarts"]
    memory = [psutil.Process(pid).memory_info().rss for pid in pids]
    with ExitStack() as stack:
        for port in knocked:
            for noise in noises():
                for stays in (True, False):
                    knocking = socket.create_connection((HOST, port), PATIENCE)
                    knocking.sendall(noise)
                    if stays:
                        stack.enter_context(knocking)
                    else:
                        knocking.close()
        assert_they_share(scene)
        assert donor.stats()["transfer_pid"] == pids[1]
        assert donor.stats()["transfer_restarts"] == restarts
        grown = [psutil.Process(p).memory_info().rss - m for p, m in zip(pids, memory, strict=True)]
        assert max(grown) < 64 << 20
    assert_they_share(scene)


def test_too_many_connections_cost_at_most_the_transfer_process(scene: Scene) -> None:
    """Gloo does not survive it; another process takes over, and the engine does not notice."""
    donor = scene.donor
    before = donor.stats()
    child = psutil.Process(before["transfer_pid"])
    engine = donor.process.pid
    knocked = ports(child.pid)
    limit = child.num_fds() + 20
    child.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
    with ExitStack() as stack:
        for number in range(2 * limit):
            try:
                port = knocked[number % len(knocked)]
                knocking = socket.create_connection((HOST, port), PATIENCE)
            except OSError:  # the process has ended
                break
            stack.enter_context(knocking).sendall(os.urandom(8))
        wait_until(
            lambda: donor.stats()["transfer_restarts"] == before["transfer_restarts"] + 1,
            "another process has started",
        )
        wait_until(donor.is_up, "the new process is ready")
    assert donor.process.pid == engine
    assert donor.process.is_alive()
    assert_they_share(scene)
