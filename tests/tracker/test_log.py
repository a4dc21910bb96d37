"""What a tracker notes: replicas that join, are lost and come back; the latest events, its own and
those that replicas report."""

from typing import Any

import pytest

from tests.logged import messages
from xinference_xavier.events import (
    Event,
    FetchRolledBack,
    ReplicaJoined,
    ReplicaLost,
    ReplicaRecovered,
    event_dict,
    read_event,
)
from xinference_xavier.protocol.tracker import Member, Settings
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.log import EventLog, Membership

NS = "namespace"
FIRST, SECOND = Member("engine-1", "host:1"), Member("engine-2", "host:2")


@pytest.fixture
def membership() -> Membership:
    return Membership("m")


def test_a_replica_joins_once_however_often_it_renews_or_moves(membership: Membership) -> None:
    event = membership.joined("m-0", FIRST)
    assert isinstance(event, ReplicaJoined)
    assert (event.model_uid, event.replica) == ("m", "m-0")
    assert (event.incarnation, event.address) == FIRST[:2]
    assert membership.joined("m-0", FIRST) is None


def test_without_a_name_a_replica_goes_by_its_incarnation(membership: Membership) -> None:
    event = membership.joined("", FIRST)
    assert isinstance(event, ReplicaJoined)
    assert event.replica == "engine-1"


@pytest.mark.parametrize(
    ("name", "member", "kind"),
    [
        ("m-0", FIRST, ReplicaRecovered),
        ("m-0", SECOND, ReplicaRecovered),
        ("m-1", SECOND, ReplicaJoined),
    ],
    ids=["the same engine", "another engine", "another replica"],
)
def test_a_lost_replica_that_comes_back_has_recovered(
    membership: Membership, name: str, member: Member, kind: type[Event]
) -> None:
    membership.joined("m-0", FIRST)
    lost = membership.lost(FIRST.incarnation)
    assert isinstance(lost, ReplicaLost)
    assert (lost.replica, lost.incarnation) == ("m-0", "engine-1")
    event = membership.joined(name, member)
    assert isinstance(event, kind)
    assert event.incarnation == member.incarnation
    assert membership.joined(name, member) is None


def event(rows: int = 1) -> Event:
    return FetchRolledBack(
        model_uid="m", incarnation="a", donor="b", reason="timeout", rows=rows, committed=0
    )


def plain(rows: int = 1, **fields: Any) -> dict[str, Any]:
    return event_dict(event(rows)) | fields


def rows_of(log: EventLog, after: int = 0) -> list[int]:
    return [record.event["rows"] for record in log.since(after)]


def test_events_come_in_order_and_once() -> None:
    """A report is repeated if its answer was lost."""
    log = EventLog()
    first, second = event(1), event(2)
    for each in (first, second, first):
        log.add(each)
    assert rows_of(log) == [1, 2]
    assert rows_of(log, log.since(0)[0].number) == [2]


def test_the_numbers_of_a_later_log_are_higher() -> None:
    """A reader of one tracker's last event gets the next tracker's first."""
    before, after = EventLog(), EventLog()
    before.add(event())
    after.add(event(2))
    assert rows_of(after, before.since(0)[-1].number) == [2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "is not a dictionary"),
        (plain(event="Hook"), "is not a known event"),
        (plain(event="os"), "is not a known event"),
        (plain(event=1), "is not a known event"),
        (plain(time="now"), "should be a valid number"),
        (plain(time=float("nan")), "cannot be written as JSON"),
        (plain(rows="many"), "should be a valid integer"),
        (plain(reason=b"bytes"), "cannot be written as JSON"),
        (plain(reason=float("inf")), "cannot be written as JSON"),
        (plain(reason="x" * 5000), "more than 4096"),
    ],
)
def test_malformed_events_are_refused(wrong: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_event(wrong)


async def test_a_replica_with_malformed_events_stays_a_member(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = BlockTracker("m")
    await tracker.join(NS, Member("a", "host:1"), Settings(), "m-0")
    bad: Any = (plain(time="now"), plain(7))
    assert await tracker.heartbeat(NS, "a", {}, bad)
    assert await tracker.heartbeat(NS, "a", {}, [1])  # type: ignore[arg-type]
    assert await tracker.heartbeat(NS, "a", {}, (plain(1),) * 101)
    names = [record.event["event"] for record in await tracker.events()]
    assert names == ["ReplicaJoined", "FetchRolledBack"]
    malformed, whole = messages(caplog)
    assert malformed.startswith("an event of a replica is malformed: {'event': 'FetchRolledBack'")
    assert whole == "a replica's events are no tuple of up to 100"
