"""The address that a replica listens on and tells its peers."""

import socket
from collections.abc import Iterator

import psutil
import pytest
import xoscar

from xinference_xavier.errors import TransportError
from xinference_xavier.runtime.addresses import split_address
from xinference_xavier.runtime.net import listen, local_host_towards, own_host


@pytest.fixture
def two_ports() -> Iterator[tuple[int, int]]:
    """Two consecutive ports, the first of them taken."""
    for low in range(20000, 30000, 2):
        with socket.socket() as taken, socket.socket() as free:
            try:
                taken.bind(("127.0.0.1", low))
                free.bind(("127.0.0.1", low + 1))
            except OSError:
                continue
            free.close()
            taken.listen()
            yield low, low + 1
            return
    raise AssertionError("no two consecutive ports are free")


@pytest.mark.parametrize("own", ["127.0.0.1", "::1"])
async def test_without_a_range_any_port_will_do(own: str) -> None:
    pool = await listen(own, None)
    try:
        host, port = split_address(pool.external_address)
        assert host == own
        assert port > 0
        with pytest.raises(xoscar.ActorNotExist):  # it answers
            await xoscar.actor_ref(pool.external_address, "nobody")
    finally:
        await pool.stop()


async def test_a_taken_port_of_the_range_is_passed_over(two_ports: tuple[int, int]) -> None:
    pool = await listen("127.0.0.1", two_ports)
    try:
        assert split_address(pool.external_address) == ("127.0.0.1", two_ports[1])
    finally:
        await pool.stop()


async def test_a_range_without_a_free_port_is_refused(two_ports: tuple[int, int]) -> None:
    taken = two_ports[0]
    with pytest.raises(TransportError, match=f"xavier_port_range={taken}-{taken} offers no port"):
        await listen("127.0.0.1", (taken, taken))


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
async def test_a_host_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(TransportError, match=f"xavier_host='{host}' offers no port"):
        await listen(host, None)


@pytest.mark.parametrize(
    ("towards", "own"), [("127.0.0.1:9", "127.0.0.1"), ("[::1]:9", "::1"), ("localhost:9", None)]
)
def test_the_own_host_is_the_address_of_the_route(towards: str, own: str | None) -> None:
    assert local_host_towards(towards) in ({own} if own else {"127.0.0.1", "::1"})


def interfaces() -> list[str]:
    """The addresses of all interfaces, each as a network of its own."""
    return [
        f"{address.address}/{'32' if address.family is socket.AF_INET else '128'}"
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
    ]


def test_in_a_network_the_own_host_is_the_address_that_is_in_it() -> None:
    assert own_host("127.0.0.0/8", "192.0.2.1:9") == "127.0.0.1"
    for address in interfaces():
        assert own_host(address, "127.0.0.1:9") == address.partition("/")[0]


def test_an_address_is_used_as_it_is_and_no_host_means_the_route_to_the_tracker() -> None:
    assert own_host("gpu-7.lan", "127.0.0.1:9") == "gpu-7.lan"
    assert own_host(None, "127.0.0.1:9") == "127.0.0.1"


@pytest.mark.parametrize("network", ["203.0.113.0/24", "2001:db8::/32"])
def test_a_network_that_this_host_is_not_on_is_refused(network: str) -> None:
    with pytest.raises(TransportError, match=f"'{network}' contains no address of this host.*127"):
        own_host(network, "127.0.0.1:9")
