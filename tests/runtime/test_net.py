"""What a replica listens on, and what it tells its peers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import xoscar

from xinference_xavier.errors import TransportError
from xinference_xavier.runtime.addresses import split_address
from xinference_xavier.runtime.net import listen, local_host_towards


@pytest.fixture
def two_ports() -> Iterator[tuple[int, int]]:
    """Two ports in a row of which the first is taken."""
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
    raise AssertionError("no two free ports in a row")


async def test_without_a_range_any_port_will_do() -> None:
    pool = await listen("127.0.0.1", None)
    try:
        host, port = split_address(pool.external_address)
        assert host == "127.0.0.1"
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
def test_the_own_host_is_the_one_on_the_way(towards: str, own: str | None) -> None:
    assert local_host_towards(towards) in ({own} if own else {"127.0.0.1", "::1"})
