"""One record has all that is known of a peer, and goes with it. `tests/engine/test_costs.py` says
what is learnt of fetches."""

import pytest

from xinference_xavier.peers import DISK, DISK_BIT, Peers
from xinference_xavier.protocol.tracker import Member


def members(names: str) -> list[Member]:
    return [Member(name, f"{name}:1") for name in names]


@pytest.fixture
def peers() -> Peers:
    peers = Peers("own")
    peers.follow([*members("abc"), Member("own", "own:1")], "epoch")
    return peers


def left(peers: Peers, names: str, epoch: str = "epoch") -> None:
    """Only the others are members."""
    peers.follow(members("".join(sorted(peers.keys() - set(names)))), epoch)
    peers.forget_absent()


def test_a_set_has_the_bits_of_its_sources(peers: Peers) -> None:
    assert peers.set_of("ac") == peers["a"].bit | peers["c"].bit
    assert sorted(peers.names(peers.set_of("ac"))) == ["a", "c"]
    assert peers.set_of([DISK, "b"]) == DISK_BIT | peers["b"].bit
    assert peers.of_set(DISK_BIT) == [peers.disk]
    assert peers.set_of(["stranger", "own"]) == 0
    assert peers.where(lambda source: source.name in "ab") == peers.set_of("ab")


def test_a_set_from_before_everything_was_forgotten_names_no_peer(peers: Peers) -> None:
    """The scheduler may still have one."""
    before = peers.set_of("abc")
    peers.clear()
    assert peers.names(before | DISK_BIT) == [DISK]


def test_numbers_are_used_again(peers: Peers) -> None:
    left(peers, "abc")
    for number in range(1000):
        peers.follow(members("x"), f"{number}")
        left(peers, "x")
    peers.follow(members("z"), "epoch")
    assert peers["z"].bit < 1 << 5
    assert peers.names(peers["z"].bit) == ["z"]


def test_the_version_tells_when_a_number_means_another_peer(peers: Peers) -> None:
    versions = [peers.version]
    for change in (
        lambda: peers.follow(members("abcd"), "epoch"),
        lambda: left(peers, "a"),
        lambda: peers.follow(members("bcde"), "epoch"),
        peers.clear,
    ):
        change()
        versions.append(peers.version)
    assert len(set(versions)) == len(versions)
    peers.follow([], "epoch")
    assert peers.version == versions[-1]


def test_whoever_leaves_is_forgotten_with_all_that_was_known(peers: Peers) -> None:
    peers["a"].received = 7
    left(peers, "a")
    assert peers.keys() == set("bc")
    peers.follow(members("abc"), "epoch")
    assert peers["a"].received == 0


def test_a_new_tracker_does_not_make_peers_look_dead(peers: Peers) -> None:
    peers.expect("new", seconds=60.0)
    peers["a"].received = 7
    left(peers, "ab", "new")
    assert (peers.keys(), peers.members, peers.serving) == (set("abc"), {"c"}, {"c"})
    assert peers.address("a") is None
    peers.follow(members("abc"), "new")
    assert (peers.members, peers["a"].received) == (set("abc"), 7)
    left(peers, "a", "new")
    assert peers.keys() == set("bc"), "the new tracker has seen it leave"


def test_after_a_lease_a_new_tracker_is_believed(peers: Peers) -> None:
    peers.expect("new", seconds=0.0)
    left(peers, "ab", "new")
    assert peers.keys() == {"c"}


def test_a_peer_that_has_moved_is_looked_for_again(peers: Peers) -> None:
    peers["a"].actor = peers["b"].actor = object()
    peers.follow([Member("a", "elsewhere:1"), *members("bc")], "epoch")
    assert peers["a"].actor is None
    assert peers["b"].actor is not None
