"""Peers count as alive while the tracker says so; a new tracker needs a lease to meet them all."""

from __future__ import annotations

import asyncio

import pytest

from xinference_xavier.replica.tracker_client import LivePeers

LEASE = 10.0


class Clock:
    """The event loop's clock, which only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)


@pytest.fixture
def alive() -> list[set[str]]:
    """Each set of peers that the replica was notified of."""
    return []


@pytest.fixture
def peers(alive: list[set[str]]) -> LivePeers:
    return LivePeers(lambda members: alive.append(set(members)))


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_members_are_alive_and_each_set_is_notified_once(
    peers: LivePeers, alive: list[set[str]], clock: Clock
) -> None:
    peers.start("epoch", LEASE)
    clock.now += LEASE
    for members in ("ab", "ab", "a", ""):
        peers.update(frozenset(members))
    assert alive == [{"a", "b"}, {"a"}, set()]


async def test_a_new_tracker_is_believed_after_one_lease(
    peers: LivePeers, alive: list[set[str]], clock: Clock
) -> None:
    peers.start("epoch", LEASE)
    peers.update(frozenset("ab"))
    peers.start("another", LEASE)
    peers.update(frozenset("a"))
    assert alive == [{"a", "b"}], "b may not have joined the new tracker yet"
    clock.now += LEASE
    peers.update(frozenset("a"))
    assert alive[-1] == {"a"}


async def test_a_peer_that_left_a_new_tracker_is_gone(
    peers: LivePeers, alive: list[set[str]], clock: Clock
) -> None:
    peers.start("epoch", LEASE)
    peers.update(frozenset("ab"))
    peers.update(frozenset("a"))
    assert alive[-1] == {"a"}


async def test_a_replica_that_leaves_has_no_peers(
    peers: LivePeers, alive: list[set[str]], clock: Clock
) -> None:
    peers.start("epoch", LEASE)
    peers.update(frozenset("ab"))
    peers.clear()
    assert alive[-1] == set()
