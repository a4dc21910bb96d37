"""Events for replicas that join, are lost and come back."""

from __future__ import annotations

import pytest

from xinference_xavier.events import ReplicaJoined, ReplicaLost, ReplicaRecovered
from xinference_xavier.protocol.tracker import Member
from xinference_xavier.tracker import log as membership_module
from xinference_xavier.tracker.log import Membership

FIRST, SECOND = Member("engine-1", "host:1"), Member("engine-2", "host:2")


def test_a_replica_joins_once_however_often_it_renews_or_moves() -> None:
    membership = Membership("m")
    event = membership.joined("m-0", FIRST)
    assert isinstance(event, ReplicaJoined)
    assert (event.model_uid, event.replica) == ("m", "m-0")
    assert (event.incarnation, event.address) == FIRST[:2]
    assert membership.joined("m-0", FIRST) is None


def test_a_lost_replica_that_comes_back_has_recovered() -> None:
    membership = Membership("m")
    membership.joined("m-0", FIRST)
    lost = membership.lost(FIRST.incarnation)
    assert isinstance(lost, ReplicaLost)
    assert (lost.replica, lost.incarnation) == ("m-0", "engine-1")
    assert isinstance(membership.joined("m-0", FIRST), ReplicaRecovered)
    assert membership.joined("m-0", FIRST) is None


def test_it_has_recovered_even_as_another_incarnation() -> None:
    membership = Membership("m")
    membership.joined("m-0", FIRST)
    membership.lost(FIRST.incarnation)
    event = membership.joined("m-0", SECOND)
    assert isinstance(event, ReplicaRecovered)
    assert event.incarnation == "engine-2"


def test_another_replica_has_joined() -> None:
    membership = Membership("m")
    membership.joined("m-0", FIRST)
    membership.lost(FIRST.incarnation)
    assert isinstance(membership.joined("m-1", SECOND), ReplicaJoined)


def test_without_a_name_a_replica_goes_by_its_incarnation() -> None:
    membership = Membership("m")
    event = membership.joined("", FIRST)
    assert isinstance(event, ReplicaJoined)
    assert event.replica == "engine-1"


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "MAX_REMEMBERED", 2)
    membership = Membership("m")
    for number in range(3):
        membership.joined("", Member(str(number), "host:1"))
    assert isinstance(membership.joined("", Member("0", "host:1")), ReplicaJoined), "long forgotten"
    assert membership.joined("", Member("2", "host:1")) is None
