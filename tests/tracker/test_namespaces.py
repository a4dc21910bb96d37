"""Members of namespaces within the tracker's limits, and when their watchers are notified."""

import asyncio

import pytest

from tests.tracker_pools import let_others_run
from xinference_xavier.protocol.tracker import CanaryReport, Member, TrackerFullError
from xinference_xavier.tracker import namespaces as namespaces_module
from xinference_xavier.tracker.namespaces import Namespaces, WatcherBatcher

A, B, C = (Member(name, "h:1") for name in "abc")
PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


@pytest.fixture
async def namespaces() -> Namespaces:
    return Namespaces("model", lease=10.0)


def join(namespaces: Namespaces, namespace: str, *members: Member, now: float = 0.0) -> None:
    for member in members:
        namespaces.join(namespace, member, now)


async def test_members_are_bounded(namespaces: Namespaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces_module, "MAX_MEMBERS", 2)
    join(namespaces, "one", A, B, A)
    with pytest.raises(TrackerFullError, match="replica 'c' exceeds the 2 of model"):
        join(namespaces, "other", C)
    join(namespaces, "other", B)
    assert namespaces.all_members() == [A, B]


async def test_a_namespace_lives_as_long_as_its_last_member(namespaces: Namespaces) -> None:
    join(namespaces, "one", A)
    join(namespaces, "two", B, now=5.0)
    assert namespaces.expire(9.9) == []
    assert namespaces.expire(10.0) == ["a"]
    assert list(dict(namespaces.items())) == ["two"]
    assert namespaces.find("one") is None
    namespaces.extend_leases(3.0)
    assert namespaces.expire(17.9) == []
    namespaces.leave("two", "b")
    assert not namespaces.items()


async def test_who_joins_another_namespace_leaves_the_first_one_and_is_not_lost(
    namespaces: Namespaces,
) -> None:
    join(namespaces, "old", A, B, C)
    join(namespaces, "new", A, C, now=5.0)
    assert namespaces.expire(10.0) == ["b"]
    assert list(dict(namespaces.items())) == ["new"]
    assert namespaces.all_members() == [A, C]


async def test_who_is_refused_elsewhere_stays_where_it_was(namespaces: Namespaces) -> None:
    join(namespaces, "old", A)
    join(namespaces, "new", B)
    with pytest.raises(ValueError, match="canar"):
        namespaces.join("new", A, 0.0, CanaryReport(b"{"))
    assert namespaces.all_members() == [A, B]


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
