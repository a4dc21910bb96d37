"""What a request would reuse follows from what the replicas hold; a self-check finds problems with
peers and ports. `test_doctor.py` covers healthy replicas and links that do not open."""

import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import xoscar as xo

from xinference_xavier.config import XavierConfig
from xinference_xavier.mirror import Mirror
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.tracker import Change, Member, Settings, Update, pack, saved_key
from xinference_xavier.replica.inspect import MAX_PEERS, Chunked, Explainer, self_check
from xinference_xavier.runtime.addresses import replica_uid

CHUNK = 10
PROMPT = 85


def key(place: int, group: int = 0) -> bytes:
    return bytes([place, 0, 0, 0, group])


def explain(
    own: str,
    *,
    min_fetch_tokens: int = 0,
    enabled: bool = True,
    groups: int = 1,
    down: str = "",
    **peers: str,
) -> dict[str, Any]:
    """Each text marks which of 8 whole chunks a replica has in its pool ("x") or only on its disk
    ("d"); peer `down` does not serve."""
    pool, mirror = Pool(20), Mirror("own")
    for row in pool.reserve(keys_at(own, "x")).rows:
        pool.commit(row)
    changes = tuple(
        Change(name, 1, pack(keys_at(held, "x") + saved_keys_at(held)), b"", True)
        for name, held in peers.items()
    )
    members = tuple(Member(name, "host:1", name != down) for name in peers)
    mirror.apply(Update(1, "epoch", True, Settings(1, enabled), 5, members, changes))
    chunks = [tuple(key(place, group) for group in range(groups)) for place in range(8)]
    chunked = Chunked(PROMPT, 4096, CHUNK, chunks)
    explainer = Explainer(
        lambda question: chunked,
        incarnation="own",
        pool=pool,
        mirror=mirror,
        is_saved=keys_at(own, "d").__contains__,
        min_fetch_tokens=min_fetch_tokens,
    )
    return explainer.explanation(chunked)


def keys_at(held: str, mark: str) -> list[bytes]:
    return [key(place) for place, each in enumerate(held) if each == mark]


def saved_keys_at(held: str) -> list[bytes]:
    return [saved_key(each) for each in keys_at(held, "d")]


@pytest.mark.parametrize(
    ("own", "peer", "other", "local_pool", "disk", "remote"),
    [
        ("--------", "--------", "--------", 0, 0, 0),
        ("xxx-----", "--------", "--------", 30, 0, 0),
        ("--------", "xxxx----", "--------", 0, 0, 40),
        ("xx------", "xxxx----", "--------", 20, 0, 20),
        ("--------", "xx------", "--xx----", 0, 0, 40),  # from two peers in turn
        ("--x-----", "xx-x----", "--------", 10, 0, 30),
        ("--x-----", "xxxx----", "--------", 10, 0, 30),
        ("--------", "-xxxxxxx", "--------", 0, 0, 0),  # useless without the first chunk
        ("xxxxxxxx", "xxxxxxxx", "xxxxxxxx", 80, 0, 0),
        ("xdd-----", "--------", "--------", 10, 20, 0),
        ("dd------", "xxxx----", "--------", 0, 0, 40),  # more than the disk has
        ("dddd----", "xxxx----", "--------", 0, 40, 0),  # at a tie
        ("--------", "xddx----", "--------", 0, 0, 40),
    ],
)
def test_reuse_equals_what_lookups_would_find(
    own: str, peer: str, other: str, local_pool: int, disk: int, remote: int
) -> None:
    answer = explain(own, peer=peer, other=other)
    assert answer["reuse"]["own"] == {
        "local_pool": local_pool,
        "disk": disk,
        "remote": remote,
        "computed": PROMPT - local_pool - disk - remote,
    }


def test_the_peer_s_reuse_is_explained_as_well() -> None:
    answer = explain("xxxx----", peer="xx------")
    assert answer["reuse"]["peer"] == {
        "local_pool": 20,
        "disk": 0,
        "remote": 20,
        "computed": 45,
    }


def test_a_run_too_short_to_be_fetched_is_computed() -> None:
    assert explain("--------", peer="xx------", min_fetch_tokens=21)["reuse"]["own"]["remote"] == 0
    assert explain("--------", peer="xxx-----", min_fetch_tokens=21)["reuse"]["own"]["remote"] == 30


@pytest.mark.parametrize(
    "without", [{"enabled": False}, {"down": "peer"}], ids=["sharing is off", "it does not serve"]
)
def test_nothing_comes_from_a_peer_that_cannot_be_asked(without: dict[str, Any]) -> None:
    answer = explain("x-------", peer="xxxx----", **without)
    own, peer = answer["reuse"]["own"], answer["reuse"]["peer"]
    assert own == {"local_pool": 10, "disk": 0, "remote": 0, "computed": 75}
    assert peer == {"local_pool": 40, "disk": 0, "remote": 0, "computed": 45}
    assert answer["chunks"][1]["replicas"] == {"own": "none", "peer": "pool"}


def test_while_sharing_is_off_nothing_is_read_from_the_disk() -> None:
    assert explain("xddd----", enabled=False)["reuse"]["own"]["disk"] == 0


def test_each_chunk_names_its_holders() -> None:
    answer = explain("x-------", peer="xd------")
    assert (answer["prompt_tokens"], answer["chunk_tokens"]) == (PROMPT, CHUNK)
    assert answer["chunks"][:3] == [
        {"from": 0, "to": 10, "replicas": {"own": "pool", "peer": "pool"}},
        {"from": 10, "to": 20, "replicas": {"own": "none", "peer": "disk"}},
        {"from": 20, "to": 30, "replicas": {"own": "none", "peer": "none"}},
    ]
    assert len(answer["chunks"]) == 8


def test_a_chunk_counts_only_with_all_its_groups() -> None:
    assert explain("xxxx----", peer="xxxx----", groups=2)["reuse"]["own"]["local_pool"] == 0


HOST = "127.0.0.1"


class Process:
    """A transfer process that did not start."""

    endpoint = None
    starts = 3
    error = "it was killed"

    async def probe_link(self, *peer: object) -> str | None:
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


async def check(*peers: Member, **config: Any) -> dict[str, Any]:
    mirror = Mirror("own")
    members = (Member("own", f"{HOST}:1"), *peers)
    mirror.apply(Update(1, "epoch", True, Settings(), 4, members, ()))
    process: Any = Process()
    return await self_check(_config(**config), HOST, mirror, process, {"dtype": "float32"})


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
    await xo.create_actor(Peer, ("nonsense",), address=address, uid=replica_uid("odd"))
    checked = await check(
        Member("starting", address), Member("odd", address), Member("gone", f"{HOST}:1")
    )
    assert checked["peers"]["starting"] == "it has no transfer process"
    for peer, where in (("odd", address), ("gone", f"{HOST}:1")):
        assert checked["peers"][peer].startswith(f"its engine at {where} does not answer: ")
    assert "own" not in checked["peers"]


async def test_the_number_of_probed_peers_is_bounded(address: str) -> None:
    many = [Member(f"{number:03}", address) for number in range(MAX_PEERS + 9)]
    assert len((await check(*many))["peers"]) == MAX_PEERS


async def test_free_ports_of_a_range_are_counted() -> None:
    checked = await check()
    assert (checked["free_ports"], checked["port_range_error"]) == (None, None)
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        low = min(port, 65535 - 2)
        checked = await check(port_range=(low, low + 2))
    assert checked["free_ports"] in range(3), "at least one of three is taken"
    assert checked["port_range_error"] is None


async def test_a_range_that_gloo_cannot_use_is_an_error() -> None:
    """It lies outside the kernel's ephemeral ports."""
    checked = await check(port_range=(1024, 1030))
    assert "1024-1030" in checked["port_range_error"]
    assert checked["free_ports"] in range(8)
