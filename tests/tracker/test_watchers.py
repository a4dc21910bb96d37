"""A change after a quiet time is sent at once, and changes soon after it are batched."""

from __future__ import annotations

import asyncio

import pytest

from xinference_xavier.tracker import namespaces as watchers_module
from xinference_xavier.tracker.namespaces import WatcherBatcher

PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


def wait_for(batcher: WatcherBatcher) -> asyncio.Task[None]:
    return asyncio.create_task(batcher.wait(PATIENCE))


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_after_a_quiet_time_a_change_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers_module, "SPACING_PER_WATCHER", 0.1)
    batcher = WatcherBatcher()
    waiting = wait_for(batcher)
    await let_others_run()
    batcher.notify(16)
    await let_others_run()
    assert waiting.done()
    assert not batcher.pending


async def test_changes_soon_after_it_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers_module, "SPACING_PER_WATCHER", 3600.0)
    batcher = WatcherBatcher()
    batcher.notify_now()
    waiting = [wait_for(batcher), wait_for(batcher)]
    for _ in range(3):
        batcher.notify(1)
        await let_others_run()
    assert batcher.pending
    assert not any(task.done() for task in waiting)
    batcher.notify_now()
    await let_others_run()
    assert not batcher.pending
    assert all(task.done() for task in waiting)


async def test_pending_changes_are_sent_when_their_time_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchers_module, "SPACING_PER_WATCHER", 0.02)
    batcher = WatcherBatcher()
    batcher.notify_now()
    for _ in range(3):
        batcher.notify(2)
        waiting = wait_for(batcher)
        async with asyncio.timeout(PATIENCE / 2):
            await waiting
        assert not batcher.pending


async def test_a_wait_ends_without_a_change() -> None:
    batcher = WatcherBatcher()
    await batcher.wait(0.01)
    assert not batcher.pending
