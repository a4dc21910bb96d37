"""One record has all that is known of a peer, and goes with it. `tests/engine/test_costs.py` says
what is learnt of fetches."""

from collections.abc import Callable

import pytest

from tests.harness.comparisons import COMPARED, compared
from xinference_xavier.peers import DISK, DISK_BIT, Peers
from xinference_xavier.protocol.tracker import Left, Member, Settings


def join(peers: Peers, names: str) -> None:
    for name in names:
        peers.follow(compared(name, f"{name}:1"))


def leave(peers: Peers, names: str) -> None:
    for name in names:
        peers.follow(Left(name))


@pytest.fixture
def peers() -> Peers:
    peers = Peers("own")
    peers.set_compared(True)
    join(peers, "abc")
    return peers


def test_a_set_has_the_bits_of_its_sources(peers: Peers) -> None:
    assert peers.set_of("ac") == peers["a"].bit | peers["c"].bit
    assert sorted(peers.names(peers.set_of("ac"))) == ["a", "c"]
    assert peers.set_of([DISK, "b"]) == DISK_BIT | peers["b"].bit
    assert peers.of_set(DISK_BIT) == [peers.disk]
    assert peers.set_of(["stranger"]) == 0
    assert peers.where(lambda source: source.name in "ab") == peers.set_of("ab")


def test_a_set_from_before_everything_was_forgotten_names_no_peer(peers: Peers) -> None:
    """The scheduler may still have one."""
    before = peers.set_of("abc")
    peers.clear()
    assert peers.names(before | DISK_BIT) == [DISK]


def test_numbers_are_used_again(peers: Peers) -> None:
    leave(peers, "abc")
    for _ in range(1000):
        join(peers, "x")
        leave(peers, "x")
    join(peers, "z")
    assert peers["z"].bit < 1 << 5
    assert peers.names(peers["z"].bit) == ["z"]


def test_the_version_tells_when_a_number_means_another_peer(peers: Peers) -> None:
    versions = [peers.version]
    for change in (
        lambda: join(peers, "d"),
        lambda: leave(peers, "a"),
        lambda: join(peers, "e"),
        peers.clear,
    ):
        change()
        versions.append(peers.version)
    assert len(set(versions)) == len(versions)
    leave(peers, "x")
    assert peers.version == versions[-1]


def test_whoever_leaves_is_forgotten_with_all_that_was_known(peers: Peers) -> None:
    peers["a"].received = 7
    leave(peers, "a")
    assert peers.keys() == set("bc")
    join(peers, "a")
    assert peers["a"].received == 0


def test_a_new_tracker_does_not_make_peers_look_dead(peers: Peers) -> None:
    peers.expect("new", seconds=60.0)
    peers["a"].received = 7
    leave(peers, "ab")
    join(peers, "c")
    assert (peers.keys(), peers.members, peers.serving) == (set("abc"), {"c"}, {"c"})
    assert peers.address("a") is None
    join(peers, "ab")
    assert (peers.members, peers["a"].received) == (set("abc"), 7)
    leave(peers, "a")
    assert peers.keys() == set("bc"), "the new tracker has seen it leave"


def test_after_a_lease_a_new_tracker_is_believed(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.expect("new", seconds=60.0)
    leave(peers, "ab")
    join(peers, "c")
    monkeypatch.setattr(peers, "_grace_until", 0.0)
    peers.forget_absent()
    assert peers.keys() == {"c"}


def test_a_peer_that_has_moved_is_looked_for_again(peers: Peers) -> None:
    peers["a"].actor = peers["b"].actor = object()
    peers.follow(compared("a", "elsewhere:1"))
    join(peers, "b")
    assert peers["a"].actor is None
    assert peers["b"].actor is not None


@pytest.mark.parametrize(
    ("change", "usable"),
    [
        (lambda peers: None, "abc"),
        (lambda peers: leave(peers, "a"), "bc"),
        (lambda peers: peers.follow(Member("a", "a:1")), "bc"),
        (lambda peers: peers.follow(Member("a", "a:1", False, COMPARED)), "bc"),
        (lambda peers: peers.set_compared(False), ""),
        (lambda peers: peers.follow(Settings(1, enabled=False)), ""),
        (lambda peers: peers.clear(), ""),
    ],
    ids=[
        "none",
        "left",
        "not compared",
        "cannot serve",
        "this one is not compared",
        "switched off",
        "cleared",
    ],
)
def test_only_who_serves_and_is_trusted_can_be_fetched_from(
    peers: Peers, change: Callable[[Peers], None], usable: str
) -> None:
    change(peers)
    assert sorted(peers.names(peers.usable)) == [*usable]
    assert [name for name in "abcd" if peers.is_usable(name)] == [*usable]


def test_an_older_switch_position_does_not_win_and_clearing_keeps_it(peers: Peers) -> None:
    peers.follow(Settings(5, enabled=False))
    peers.follow(Settings(4))
    peers.clear()
    assert not peers.enabled
