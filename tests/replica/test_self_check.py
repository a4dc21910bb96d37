"""A replica that looks for the reason why it does not share, where its peers or its ports are the
reason; healthy ones, and links that cannot be opened, are in `tests/client/test_doctor.py`."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.config import XavierConfig
from xinference_xavier.protocol.tracker import Member, Settings, Update
from xinference_xavier.replica.mirror import Mirror
from xinference_xavier.replica.self_check import MAX_PEERS, SelfCheck
from xinference_xavier.runtime.addresses import replica_uid

HOST = "127.0.0.1"


class Process:
    """A transfer process that has not come up."""

    endpoint = None
    starts = 3
    error = "it was killed"

    async def reach(self, *peer: object) -> str | None:
        raise AssertionError("no peer here has a transfer process to reach")


class Peer(xo.StatelessActor):  # type: ignore[misc]  # xoscar has no types
    def __init__(self, endpoint: object) -> None:
        super().__init__()
        self._endpoint = endpoint

    async def transfer_endpoint(self) -> object:
        return self._endpoint


@pytest.fixture
async def address() -> AsyncIterator[str]:
    pool = await xo.create_actor_pool(f"{HOST}:0", n_process=0, use_uvloop=False)
    async with pool:
        yield pool.external_address


async def examined(*peers: Member, **config: Any) -> dict[str, Any]:
    mirror = Mirror("own")
    members = (Member("own", f"{HOST}:1"), *peers)
    mirror.apply(Update(1, "epoch", True, Settings(), 4, members, ()))
    process: Any = Process()
    check = SelfCheck(_config(**config), HOST, mirror, process, {"dtype": "float32"})
    return await check.run()


def _config(**options: Any) -> XavierConfig:
    return XavierConfig(model_uid="m", tracker_address=f"{HOST}:1", pool_bytes=1 << 20, **options)


async def test_what_it_tells_travels_as_json() -> None:
    checked = await examined()
    assert json.loads(json.dumps(checked)) == checked
    assert checked["fingerprint_fields"] == {"dtype": "float32"}
    assert checked["config"]["model_uid"] == "m"
    assert (checked["transfer_address"], checked["transfer_starts"]) == (None, 3)
    assert checked["transfer_error"] == "it was killed"


async def test_each_peer_has_its_own_reason(address: str) -> None:
    await xo.create_actor(Peer, None, address=address, uid=replica_uid("starting"))
    await xo.create_actor(Peer, ("nonsense",), address=address, uid=replica_uid("odd"))
    checked = await examined(
        Member("starting", address), Member("odd", address), Member("gone", f"{HOST}:1")
    )
    assert checked["peers"]["starting"] == "it has no transfer process"
    for peer, where in (("odd", address), ("gone", f"{HOST}:1")):
        assert checked["peers"][peer].startswith(f"its engine at {where} does not answer: ")
    assert "own" not in checked["peers"]


async def test_of_very_many_peers_some_are_tried(address: str) -> None:
    many = [Member(f"{number:03}", address) for number in range(MAX_PEERS + 9)]
    assert len((await examined(*many))["peers"]) == MAX_PEERS


async def test_ports_are_counted_where_a_range_confines_them() -> None:
    checked = await examined()
    assert (checked["free_ports"], checked["port_range_error"]) == (None, None)
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        low = min(port, 65535 - 2)
        checked = await examined(port_range=(low, low + 2))
    assert checked["free_ports"] in range(3), "one of three is taken"
    assert checked["port_range_error"] is None


async def test_a_range_that_gloo_cannot_use_says_why() -> None:
    """It leaves the ports that the kernel chooses among."""
    checked = await examined(port_range=(1024, 1030))
    assert "1024-1030" in checked["port_range_error"]
    assert checked["free_ports"] in range(8)
