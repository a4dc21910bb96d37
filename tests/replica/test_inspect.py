"""An explanation says who holds a prompt's chunks, and a self-check finds problems with peers and
ports. `test_doctor.py` covers healthy replicas and links that do not open."""

import json
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import xoscar as xo

from tests.harness.comparisons import compared, snapshot
from xinference_xavier.config import XavierConfig
from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.tracker import Member
from xinference_xavier.protocol.transfer import Endpoint
from xinference_xavier.replica.disk import NoDisk
from xinference_xavier.replica.inspect import MAX_PEERS, Chunked, Explainer, self_check
from xinference_xavier.replica.peer_tier import PeerTier
from xinference_xavier.runtime.addresses import replica_uid

CHUNK = 10
PROMPT = 85


def key(place: int, group: int = 0) -> bytes:
    return bytes([place, *bytes(10), group])


def explain(own: str, *, groups: int = 1, **peers: str) -> dict[str, Any]:
    """Each text marks which of 8 whole chunks a replica has in its pool ("x"); "d" in `own` only on
    its disk."""
    pool, index = Pool(20), Index(Peers("own"))
    for row in pool.reserve(keys_at(own, "x")).rows:
        pool.commit(row)
    holdings = {name: keys_at(held, "x") for name, held in peers.items()}
    index.apply(snapshot(*map(compared, peers), **holdings))
    chunks = [tuple(key(place, group) for group in range(groups)) for place in range(8)]
    chunked = Chunked(PROMPT, 4096, CHUNK, chunks)
    disk = NoDisk()
    disk.index = tuple(keys_at(own, "d"))
    explainer = Explainer(lambda question: chunked, "own", PeerTier(pool, index, disk))
    return explainer.explanation(chunked)


def keys_at(held: str, mark: str) -> list[bytes]:
    return [key(place) for place, each in enumerate(held) if each == mark]


def test_each_chunk_names_its_holders() -> None:
    answer = explain("xd------", peer="xx------")
    assert (answer["prompt_tokens"], answer["chunk_tokens"]) == (PROMPT, CHUNK)
    assert answer["chunks"][:3] == [
        {"from": 0, "to": 10, "replicas": {"own": "pool", "peer": "pool"}},
        {"from": 10, "to": 20, "replicas": {"own": "disk", "peer": "pool"}},
        {"from": 20, "to": 30, "replicas": {"own": "none", "peer": "none"}},
    ]
    assert len(answer["chunks"]) == 8


def test_a_chunk_counts_only_with_all_its_groups() -> None:
    answer = explain("xxxx----", peer="xxxx----", groups=2)
    assert answer["chunks"][0]["replicas"] == {"own": "none", "peer": "none"}


HOST = "127.0.0.1"


class Process:
    """A transfer process that did not start."""

    endpoint = None
    starts = 3
    error = "it was killed"

    async def try_link(self, *peer: object) -> str | None:
        raise AssertionError("no peer here has a transfer process")

    async def stats(self) -> dict[str, object]:
        return {}


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


class Mapped(NamedTuple):
    """Neighbours, each with its transport, and why not a better one."""

    linked_to: Mapping[str, str] = MappingProxyType({})
    obstacles: Mapping[str, str] = MappingProxyType({})

    def get(self, name: str) -> str | None:
        return self.linked_to.get(name)


async def check(*peers: Member, neighbours: Mapped | None = None, **config: Any) -> dict[str, Any]:
    index = Index(Peers("own"))
    index.apply(snapshot(*peers))
    process: Any = Process()
    mapped: Any = neighbours or Mapped()
    fields = {"dtype": "float32"}
    return await self_check(_config(**config), index.members, process, mapped, fields)


def _config(**options: Any) -> XavierConfig:
    return XavierConfig(model_uid="m", tracker_address=f"{HOST}:1", pool_bytes=1 << 20, **options)


async def test_the_result_is_json() -> None:
    checked = await check()
    assert json.loads(json.dumps(checked)) == checked
    assert checked["fingerprint_fields"] == {"dtype": "float32"}
    assert checked["config"]["model_uid"] == "m"
    assert (checked["transfer_address"], checked["transfer_starts"]) == (None, 3)
    assert checked["transfer_error"] == "it was killed"


async def test_each_peer_has_its_own_reason(address: str) -> None:
    await xo.create_actor(Peer, None, address=address, uid=replica_uid("starting"))
    checked = await check(Member("starting", address), Member("gone", f"{HOST}:1"))
    assert checked["peers"]["starting"] == "it has no transfer process"
    assert checked["peers"]["gone"].startswith(f"its engine at {HOST}:1 does not answer: ")
    assert "own" not in checked["peers"]


async def test_a_neighbour_needs_no_link_and_has_the_reason_for_its_copies(address: str) -> None:
    names, endpoint = ("lends", "copied", "elsewhere"), Endpoint("host:1")
    for name in names:
        await xo.create_actor(Peer, endpoint, address=address, uid=replica_uid(name))
    mapped = Mapped(
        {"lends": "in_place", "copied": "shared_memory"},
        {"copied": "the driver refuses", "elsewhere": "not on this host"},
    )
    members = [Member(name, address) for name in names]
    checked = await check(*members, neighbours=mapped, transport="shared_memory")
    assert checked["peers"] == {"lends": None, "copied": None, "elsewhere": "not on this host"}
    assert checked["linked_to"] == mapped.linked_to
    assert checked["obstacles"] == {
        "copied": {"in_place": "the driver refuses"},
        "elsewhere": {"shared_memory": "not on this host"},
    }


async def test_the_number_of_peers_that_are_tried_is_bounded(address: str) -> None:
    many = [Member(f"{number:03}", address) for number in range(MAX_PEERS + 9)]
    assert len((await check(*many))["peers"]) == MAX_PEERS
