"""What a mirror may rely on when it keeps sets of peers as integers."""

from __future__ import annotations

import pytest

from xinference_xavier import mirror
from xinference_xavier.mirror import PeerSets


@pytest.fixture
def sets() -> PeerSets:
    sets = PeerSets()
    for peer in "abc":
        sets.bit(peer)
    return sets


def test_a_set_names_its_peers(sets: PeerSets) -> None:
    assert sets.bit("a") | sets.bit("c") == sets.set_of("ac")
    assert sorted(sets.names(sets.set_of("ac"))) == ["a", "c"]
    assert sets.names(0) == []
    assert sets.peers == {"a", "b", "c"}


def test_strangers_are_in_no_set(sets: PeerSets) -> None:
    assert sets.set_of(["stranger", "b"]) == sets.bit("b")
    assert "stranger" not in sets


def test_a_set_from_before_everything_was_forgotten_names_nobody(sets: PeerSets) -> None:
    """The scheduler may still have one."""
    assert PeerSets().names(sets.set_of("abc")) == []


def test_numbers_are_used_again(sets: PeerSets) -> None:
    for number in range(1000):
        sets.bit(f"{number}")
        sets.forget([f"{number}"])
    assert sets.bit("last") < 1 << 4
    assert sets.names(sets.set_of(["last"])) == ["last"]


def test_the_version_tells_when_a_number_means_another_peer(sets: PeerSets) -> None:
    versions = [sets.version]
    for change in (lambda: sets.bit("d"), lambda: sets.forget("a"), lambda: sets.bit("e")):
        change()
        versions.append(sets.version)
    assert len(set(versions)) == 4
    sets.bit("e")
    assert sets.version == versions[-1]


def test_equal_sets_are_one_object(sets: PeerSets) -> None:
    large = [sets.bit(f"{number}") for number in range(100)]
    assert sets.shared(sum(large)) is sets.shared(sum(reversed(large)))


def test_sets_that_exist_no_more_are_forgotten(
    sets: PeerSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "MAX_SHARED", 2)
    for names in ("a", "ab", "abc"):
        assert sorted(sets.names(sets.shared(sets.set_of(names)))) == list(names)
    assert len(sets._shared) == 2
    sets.forget("b")
    assert list(sets._shared) == [sets.set_of("a")]
