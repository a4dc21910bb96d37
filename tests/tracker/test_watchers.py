"""A change after a quiet time is sent at once, what follows soon after it together."""

from __future__ import annotations

import asyncio

import pytest

from xinference_xavier.tracker import watchers as news_module
from xinference_xavier.tracker.watchers import WatcherBatcher

PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


def wait_for(news: WatcherBatcher) -> asyncio.Task[None]:
    return asyncio.create_task(news.wait(PATIENCE))


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_after_a_quiet_time_news_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news_module, "SPACING_PER_WATCHER", 0.1)
    news = WatcherBatcher()
    waiting = wait_for(news)
    await let_others_run()
    news.notify(16)
    await let_others_run()
    assert waiting.done()
    assert not news.pending


async def test_what_follows_soon_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news_module, "SPACING_PER_WATCHER", 3600.0)
    news = WatcherBatcher()
    news.notify_now()
    waiting = [wait_for(news), wait_for(news)]
    for _ in range(3):
        news.notify(1)
        await let_others_run()
    assert news.pending
    assert not any(task.done() for task in waiting)
    news.notify_now()
    await let_others_run()
    assert not news.pending
    assert all(task.done() for task in waiting)


async def test_what_was_pending_is_told_when_its_time_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(news_module, "SPACING_PER_WATCHER", 0.02)
    news = WatcherBatcher()
    news.notify_now()
    for _ in range(3):
        news.notify(2)
        waiting = wait_for(news)
        async with asyncio.timeout(PATIENCE / 2):
            await waiting
        assert not news.pending


async def test_a_wait_ends_without_news() -> None:
    news = WatcherBatcher()
    await news.wait(0.01)
    assert not news.pending
