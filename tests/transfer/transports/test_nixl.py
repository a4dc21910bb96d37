"""Links over NIXL, here by TCP: what reads memory stops only by itself."""

import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.harness.processes import frozen
from tests.harness.remote import Remote, obey, spawned
from tests.harness.replicas import wait_until
from tests.transfer.transports.links import (
    HOST,
    ROW_BYTES,
    ROWS,
    Halves,
    Link,
    Side,
    later,
    soon,
    unchecked,
)
from xinference_xavier.errors import LinkError, TransportError
from xinference_xavier.pool.region import Region
from xinference_xavier.transfer.transports import nixl
from xinference_xavier.transfer.transports.nixl import ConsumerLink, NixlTransport

ALL = range(ROWS)


@pytest.fixture
def transport() -> type[NixlTransport]:
    return NixlTransport


class _Donor:
    """A donor in a process of its own, which a test can stop or kill."""

    def __init__(self) -> None:
        self._side = Side.make(NixlTransport, seed=2)
        self._threads = ThreadPoolExecutor(1)

    def rows(self) -> bytes:
        return self._side.region.array.tobytes()

    def accept(self, hello: bytes) -> bytes:
        self._half: Any = self._side.transport.accept(hello, later())
        self._completing: Future[Any] = self._threads.submit(self._half.complete, later())
        return bytes(self._half.answer)


@pytest.fixture
def elsewhere() -> Iterator[Remote]:
    with Remote(obey, _Donor, name="donor", context=spawned()) as donor:
        yield donor


@pytest.fixture
def far(here: Side, elsewhere: Remote) -> Iterator[ConsumerLink]:
    """A link from `elsewhere` to `here`."""
    offer = here.transport.offer(later())
    link: ConsumerLink = offer.complete(elsewhere.call("accept", offer.hello), later())
    yield link
    link.close()


@contextmanager
def stuck(
    far: ConsumerLink, elsewhere: Remote, threads: ThreadPoolExecutor, until: Callable[[], float]
) -> Iterator[Future[list[int]]]:
    """A batch that is being read from a donor that stands still."""
    with frozen([psutil.Process(elsewhere.pid)]) as stand_still:
        wait_until(stand_still, "the donor stands still")
        receiving = threads.submit(lambda: [*far.receive(ALL, ALL, unchecked, until())])
        wait_until(lambda: bool(far._reads), "it reads")
        yield receiving


def test_rows_come_from_another_process(here: Side, elsewhere: Remote, far: ConsumerLink) -> None:
    assert [*far.receive(ALL, ALL, unchecked, later())] == [*ALL]
    assert here.region.array.tobytes() == elsewhere.call("rows")


def test_a_link_that_gives_up_ends_only_when_nothing_writes_its_rows_any_more(
    here: Side, elsewhere: Remote, far: ConsumerLink, threads: ThreadPoolExecutor
) -> None:
    """A read that was released would still arrive; the engine must not use the rows until then."""
    with stuck(far, elsewhere, threads, soon) as receiving:
        closing = threads.submit(far.close)
        with pytest.raises(TimeoutError):
            closing.result(1.0)
        assert not receiving.done(), "its deadline has passed"
    closing.result()
    with pytest.raises(LinkError):
        receiving.result()
    before = here.region.array.copy()
    # The donor has sent everything that it was asked for before it answers this.
    elsewhere.call("rows")
    assert np.array_equal(here.region.array, before)


def test_a_donor_that_is_killed_ends_the_read(
    here: Side, elsewhere: Remote, far: ConsumerLink, threads: ThreadPoolExecutor
) -> None:
    with stuck(far, elsewhere, threads, later) as receiving:
        elsewhere.process.kill()
        with pytest.raises(LinkError, match="NIXL failed"):
            receiving.result()
    far.close()
    assert far._memory.agent not in here.transport._agent._users, "its agent is forgotten"


def test_a_donor_that_was_killed_while_the_link_was_idle_is_forgotten(
    here: Side, elsewhere: Remote, far: ConsumerLink
) -> None:
    elsewhere.process.kill()
    elsewhere.process.join()
    with pytest.raises(LinkError, match="NIXL failed"):
        [*far.receive(ALL, ALL, unchecked, later())]
    far.close()
    assert far._memory.agent not in here.transport._agent._users


def test_an_acceptance_that_is_withdrawn_waits_for_nobody(
    halves: Halves, threads: ThreadPoolExecutor
) -> None:
    waiting = threads.submit(halves.acceptance.complete, later())
    halves.acceptance.withdraw()
    with pytest.raises(LinkError, match="closed"):
        waiting.result()


def test_links_to_one_process_come_and_go_without_a_new_connection(
    here: Side, there: Side, threads: ThreadPoolExecutor
) -> None:
    """Each would leave two sockets. Those of earlier tests may end meanwhile."""

    def sockets() -> set[Any]:
        return {(each.laddr, each.raddr) for each in psutil.Process().net_connections("tcp")}

    Link.make(here, there, threads).close()
    before = sockets()
    for _ in range(5):
        link = Link.make(here, there, threads)
        assert [*link.move([1], [2])] == [1]
        link.close()
    assert sockets() <= before


def test_it_listens_only_where_it_may() -> None:
    def listening() -> set[tuple[str, int]]:
        sockets = psutil.Process().net_connections("tcp")
        return {tuple(s.laddr) for s in sockets if s.status == psutil.CONN_LISTEN}

    with socket.socket() as free:
        free.bind((HOST, 0))
        low = free.getsockname()[1]
    before = listening()
    region = Region.create(ROWS, ROW_BYTES)
    kept = NixlTransport(region, HOST, (low, low + 20))
    opened = listening() - before
    assert [host for host, _ in opened] == [HOST]
    assert {port for _, port in opened} <= {*range(low, low + 21)}
    del kept
    region.close()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The state of the port of an RDMA device."""
    monkeypatch.setattr(nixl, "_DEVICES", tmp_path)
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("4: ACTIVE\n")
    return state


def test_it_is_fit_where_an_rdma_port_is_up_and_the_packages_are(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NixlTransport.unfit() is None
    device.write_text("1: DOWN\n")
    assert NixlTransport.unfit() == "no active RDMA port"
    device.unlink()
    assert NixlTransport.unfit() == "no active RDMA port"
    monkeypatch.setattr(nixl, "_PACKAGE", "no_such_package")
    assert NixlTransport.unfit() == "package missing: no_such_package"


def test_with_an_rdma_port_it_never_goes_over_tcp(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert nixl._ucx(HOST, (40000, 40100), 1 << 30) == "TLS=ib"
    region = Region.create(1, 4096)
    with pytest.raises(TransportError, match="NIXL cannot register the pool"):
        NixlTransport(region, HOST, None)  # this host has no such device
    region.close()


@pytest.mark.usefixtures("device")
def test_a_limit_of_locked_memory_below_the_pool_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    with pytest.raises(TransportError, match=r"limit is 8388608; .* ulimit -l unlimited"):
        nixl._ucx(HOST, None, 1 << 30)
    assert nixl._ucx(HOST, None, 8 << 20)


def test_what_the_environment_says_of_ucx_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nixl._ucx(HOST, (40000, 40100), 1) == (
        "TLS=tcp,NET_DEVICES=lo,TCP_PORT_RANGE=40000-40100"
    )
    monkeypatch.setenv("UCX_TLS", "sm,tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth9")
    assert nixl._ucx(HOST, None, 1) == ""


def test_an_idle_agent_does_not_spin(here: Side) -> None:
    """NIXL's own thread takes a whole processor."""
    began, used = time.monotonic(), time.process_time()
    threading.Event().wait(1.0)
    assert time.process_time() - used < (time.monotonic() - began) / 2


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    region = Region.create(1, 4096)
    with pytest.raises(TransportError, match=r"pip install 'xinference-xavier\[rdma\]'"):
        NixlTransport(region, HOST, None)
    region.close()
