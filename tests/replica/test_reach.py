"""Peers on this host are linked by shared memory. Other peers are linked by another transport, and
so is one with which shared memory has failed. Processes on different hosts must never count as
being on one host."""

import logging

import pytest

from tests.logged import messages
from xinference_xavier.errors import OutOfReachError
from xinference_xavier.peers import Peer
from xinference_xavier.protocol.transfer import Endpoint, Started
from xinference_xavier.replica import reach
from xinference_xavier.replica.reach import (
    DIFFERENCES,
    MAX_RETRY_AFTER,
    MEMORY_NOT_SHARED,
    RETRY_AFTER,
    difference,
    fell_back,
    meet,
    obstacles,
    transports,
)

HERE, THERE = "boot 1 0", "boot 2 0"
OWN = Endpoint("own:1", HERE)
ALL = Started(OWN, {"near": HERE, "between": None, "far": None}, {"best": "no such device"})


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reach, "time", clock)
    return clock


@pytest.fixture
def peer() -> Peer:
    peer = Peer("peer", 2)
    meet(peer, Endpoint("host:1", HERE))
    return peer


@pytest.mark.usefixtures("clock")
def test_each_transport_fails_for_itself(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    """What is reported is why a better one is not used."""
    assert transports(ALL, peer) == ("near", "between", "far")
    assert obstacles(ALL, peer) == {"best": "no such device"}
    with caplog.at_level(logging.WARNING):
        fell_back(peer, [("between", "it burns")])
    (message,) = messages(caplog)
    assert message == "between failed with donor peer; falling back for 60 s: error=it burns"
    assert transports(ALL, peer) == ("near", "far")
    meet(peer, Endpoint("host:1", THERE))
    fell_back(peer, [("between", "it burns")])
    assert transports(ALL, peer) == ("far",)
    assert obstacles(ALL, peer) == {
        "best": "no such device",
        "near": "other network namespace",
        "between": "it burns",
    }


def test_one_that_failed_is_tried_again_after_ever_longer_pauses(peer: Peer, clock: Clock) -> None:
    pause = RETRY_AFTER
    for _ in range(6):
        fell_back(peer, [("near", "no such socket")])
        clock.now += pause - 1.0
        assert "near" not in transports(ALL, peer)
        clock.now += 1.0
        assert "near" in transports(ALL, peer)
        pause = min(2 * pause, MAX_RETRY_AFTER)


@pytest.mark.usefixtures("clock")
def test_with_another_transfer_process_it_is_tried_at_once(peer: Peer) -> None:
    fell_back(peer, [("near", "no such socket")])
    meet(peer, Endpoint("host:1", HERE))
    assert "near" not in transports(ALL, peer)
    meet(peer, Endpoint("host:2", HERE))
    assert "near" in transports(ALL, peer)


@pytest.mark.parametrize(
    ("host", "reason"), [(None, MEMORY_NOT_SHARED), ("another 1 0", "other machine")]
)
def test_where_memory_is_all_we_have_the_reason_why_it_is_not_shared_is_said(
    peer: Peer, host: str | None, reason: str
) -> None:
    meet(peer, Endpoint("host:1", host))
    with pytest.raises(OutOfReachError, match=f"no link by near: {reason}") as raised:
        transports(Started(OWN, {"near": HERE}, {}), peer)
    assert raised.value.reason == reason


@pytest.mark.parametrize("theirs", ["", "x", "{own} more", "{own} ", " {own}"])
def test_a_malformed_identity_is_not_our_host(theirs: str) -> None:
    assert difference(HERE, theirs.format(own=HERE)) in DIFFERENCES
    assert difference(HERE, HERE) is None
    assert difference(HERE, "boot 1 1") == "other user"
