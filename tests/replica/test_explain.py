"""What a request would reuse follows from what the replicas hold."""

from __future__ import annotations

from typing import Any

import pytest

from xinference_xavier.mirror import Mirror
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.tracker import Change, Member, Settings, Update, pack
from xinference_xavier.replica.inspect import Chunked, explanation

CHUNK = 10
PROMPT = 85


def key(place: int, group: int = 0) -> bytes:
    return bytes([place, group])


def explain(
    own: str,
    *,
    min_fetch_tokens: int = 0,
    enabled: bool = True,
    groups: int = 1,
    down: str = "",
    **peers: str,
) -> dict[str, Any]:
    """Each text marks with an "x" which of 8 whole chunks a replica holds; peer `down` does not
    serve."""
    pool, mirror = Pool(20), Mirror("own")
    for row in pool.reserve([key(place) for place in places(own)]).rows:
        pool.commit(row)
    changes = tuple(
        Change(name, 1, pack(key(place) for place in places(held)), b"", True)
        for name, held in peers.items()
    )
    members = tuple(Member(name, "host:1", name != down) for name in peers)
    mirror.apply(Update(1, "epoch", True, Settings(1, enabled), 2, members, changes))
    chunks = [tuple(key(place, group) for group in range(groups)) for place in range(8)]
    return explanation(
        Chunked(PROMPT, 4096, CHUNK, chunks),
        incarnation="own",
        pool=pool,
        mirror=mirror,
        min_fetch_tokens=min_fetch_tokens,
    )


def places(held: str) -> list[int]:
    return [place for place, mark in enumerate(held) if mark == "x"]


@pytest.mark.parametrize(
    ("own", "peer", "other", "local_pool", "remote"),
    [
        ("--------", "--------", "--------", 0, 0),
        ("xxx-----", "--------", "--------", 30, 0),
        ("--------", "xxxx----", "--------", 0, 40),
        ("xx------", "xxxx----", "--------", 20, 20),
        ("--------", "xx------", "--xx----", 0, 40),  # from two peers in turn
        ("--x-----", "xx-x----", "--------", 10, 30),
        ("--x-----", "xxxx----", "--------", 10, 30),
        ("--------", "-xxxxxxx", "--------", 0, 0),  # useless without the first chunk
        ("xxxxxxxx", "xxxxxxxx", "xxxxxxxx", 80, 0),
    ],
)
def test_reuse_equals_what_lookups_would_find(
    own: str, peer: str, other: str, local_pool: int, remote: int
) -> None:
    answer = explain(own, peer=peer, other=other)
    assert answer["reuse"]["own"] == {
        "local_pool": local_pool,
        "remote": remote,
        "computed": PROMPT - local_pool - remote,
    }


def test_the_peer_s_reuse_is_explained_as_well() -> None:
    answer = explain("xxxx----", peer="xx------")
    assert answer["reuse"]["peer"] == {"local_pool": 20, "remote": 20, "computed": 45}


def test_a_run_too_short_to_be_fetched_is_computed() -> None:
    assert explain("--------", peer="xx------", min_fetch_tokens=21)["reuse"]["own"]["remote"] == 0
    assert explain("--------", peer="xxx-----", min_fetch_tokens=21)["reuse"]["own"]["remote"] == 30


@pytest.mark.parametrize(
    "without", [{"enabled": False}, {"down": "peer"}], ids=["sharing is off", "it does not serve"]
)
def test_nothing_comes_from_a_peer_that_cannot_be_asked(without: dict[str, Any]) -> None:
    answer = explain("x-------", peer="xxxx----", **without)
    assert answer["reuse"]["own"] == {"local_pool": 10, "remote": 0, "computed": 75}
    assert answer["reuse"]["peer"] == {"local_pool": 40, "remote": 0, "computed": 45}
    assert answer["chunks"][1]["replicas"] == {"own": "none", "peer": "pool"}


def test_each_chunk_names_its_holders() -> None:
    answer = explain("x-------", peer="xx------")
    assert (answer["prompt_tokens"], answer["chunk_tokens"]) == (PROMPT, CHUNK)
    assert answer["chunks"][:3] == [
        {"from": 0, "to": 10, "replicas": {"own": "pool", "peer": "pool"}},
        {"from": 10, "to": 20, "replicas": {"own": "none", "peer": "pool"}},
        {"from": 20, "to": 30, "replicas": {"own": "none", "peer": "none"}},
    ]
    assert len(answer["chunks"]) == 8


def test_a_chunk_counts_only_with_all_its_groups() -> None:
    assert explain("xxxx----", peer="xxxx----", groups=2)["reuse"]["own"]["local_pool"] == 0
