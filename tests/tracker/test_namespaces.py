"""Members of namespaces within the tracker's limits, and when their watchers are notified."""

import asyncio

import pytest

from tests.tracker_pools import let_others_run
from xinference_xavier.protocol.tracker import Member, TrackerFullError
from xinference_xavier.tracker import namespaces as namespaces_module
from xinference_xavier.tracker.namespaces import Namespaces, WatcherBatcher

A, B, C = (Member(name, "h:1") for name in "abc")
PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


@pytest.fixture
async def namespaces() -> Namespaces:
    return Namespaces("model", lease=10.0, max_keys=100)


def join(namespaces: Namespaces, namespace: str, *members: Member, now: float = 0.0) -> None:
    for member in members:
        namespaces.join(namespace, member, 4, now)


async def test_members_and_namespaces_are_bounded(
    namespaces: Namespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces_module, "MAX_MEMBERS", 2)
    join(namespaces, "one", A, B, A)
    with pytest.raises(TrackerFullError, match="replica 'c' exceeds the 2 of model"):
        join(namespaces, "one", C)
    namespaces.leave("one", "b", moving=False, now=0.0)
    monkeypatch.setattr(namespaces_module, "LIMIT", 1)
    with pytest.raises(TrackerFullError, match="namespace 'other' exceeds the 1 of model"):
        join(namespaces, "other", B)
    assert namespaces.all_members() == [A]


async def test_a_namespace_lives_as_long_as_its_last_member(namespaces: Namespaces) -> None:
    join(namespaces, "one", A)
    join(namespaces, "two", B, now=5.0)
    assert namespaces.expire(9.9) == []
    assert namespaces.expire(10.0) == ["a"]
    assert list(dict(namespaces.items())) == ["two"]
    assert namespaces.find("one") is None
    namespaces.extend_leases(3.0)
    assert namespaces.expire(17.9) == []
    namespaces.leave("two", "b", moving=False, now=18.0)
    assert not namespaces.items()


async def test_a_moving_replica_belongs_to_the_model_and_is_lost_unless_it_joins_in_time(
    namespaces: Namespaces,
) -> None:
    join(namespaces, "old", A, B)
    join(namespaces, "old", C, now=5.0)
    for name in ("a", "b", "b"):  # a farewell may be repeated
        namespaces.leave("old", name, moving=True, now=1.0)
    assert namespaces.all_members() == [C]
    join(namespaces, "new", A._replace(serves=False), now=2.0)
    namespaces.find_member("new", "a").index.set_serving("a", True)
    assert namespaces.members_and_moving() == [C, A, B]
    assert namespaces.expire(10.9) == []
    assert namespaces.members_and_moving() == [C, A, B]
    assert namespaces.expire(11.0) == ["b"]
    assert namespaces.expire(11.5) == [], "once"
    assert namespaces.members_and_moving() == [C, A]


async def test_one_that_leaves_for_good_meanwhile_is_not_lost(namespaces: Namespaces) -> None:
    join(namespaces, "old", A)
    namespaces.leave("old", "a", moving=True, now=1.0)
    namespaces.leave("new", "a", moving=False, now=2.0)
    assert namespaces.members_and_moving() == []
    assert namespaces.expire(60.0) == []


async def test_a_pause_of_the_tracker_gives_a_moving_replica_more_time(
    namespaces: Namespaces,
) -> None:
    join(namespaces, "old", A)
    namespaces.leave("old", "a", moving=True, now=1.0)
    namespaces.extend_leases(60.0)
    assert namespaces.expire(62.0) == []
    assert namespaces.expire(71.0) == ["a"]


async def test_a_replica_that_is_in_another_namespace_by_now_is_not_lost(
    namespaces: Namespaces,
) -> None:
    """Its farewell to the old one did not arrive, or arrived late."""
    join(namespaces, "old", A, B)
    join(namespaces, "new", A, B, now=5.0)
    namespaces.leave("old", "b", moving=True, now=6.0)
    assert namespaces.expire(10.0) == []
    assert namespaces.all_members() == [A, B]
    join(namespaces, "new", A, B, now=12.0)
    assert namespaces.expire(16.0) == []


def wait_for(batcher: WatcherBatcher) -> asyncio.Task[None]:
    """Wait for news that the next notification brings."""
    return asyncio.create_task(batcher.wait_for(iter((False, True)).__next__, PATIENCE))


async def test_after_a_quiet_time_a_change_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces_module, "SPACING_PER_WATCHER", 0.1)
    batcher = WatcherBatcher()
    waiting = wait_for(batcher)
    await let_others_run()
    batcher.notify(16)
    await let_others_run()
    assert waiting.done()
    assert not batcher.pending


async def test_changes_soon_after_it_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces_module, "SPACING_PER_WATCHER", 3600.0)
    batcher = WatcherBatcher()
    batcher.notify_now()
    waiting = [wait_for(batcher), wait_for(batcher)]
    for _ in range(3):
        await let_others_run()
        batcher.notify(1)
    assert batcher.pending
    assert not any(task.done() for task in waiting)
    batcher.notify_now()
    await let_others_run()
    assert not batcher.pending
    assert all(task.done() for task in waiting)


async def test_pending_changes_are_sent_when_their_time_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces_module, "SPACING_PER_WATCHER", 0.02)
    batcher = WatcherBatcher()
    batcher.notify_now()
    for _ in range(3):
        batcher.notify(2)
        async with asyncio.timeout(PATIENCE / 2):
            await batcher.wait_for(lambda: True, PATIENCE)
        assert not batcher.pending
