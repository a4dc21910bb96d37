"""A replica publishes its holdings to an index that applies them or refuses to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from xinference_xavier.protocol.tracker import Change, Member, NotMemberError
from xinference_xavier.replica import reports as publisher_module
from xinference_xavier.replica.reports import Counters, Publisher
from xinference_xavier.tracker.index import Index

K1, K2, K3 = b"key1", b"key2", b"key3"
PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


class Side:
    """A publisher, the holdings behind it, and the index that it talks to."""

    def __init__(self) -> None:
        self.index = Index()
        self.index.join(Member("a", "h:1"), len(K1), 0.0)
        self.pool: set[bytes] = set()
        self.counters = Counters()
        self.publisher = Publisher("a", lambda: self.pool, self.counters)
        self._called = asyncio.Event()

    async def call(self, method: str, *arguments: Any) -> Any:
        self._called.set()
        if method == "publish":
            return self.index.publish("a", *arguments)
        sequence, keys = arguments
        return self.index.publish("a", sequence, keys, b"", replaces=True)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not true():
                self._called.clear()
                await self._called.wait()
                await asyncio.sleep(0)

    def changes(self, since: int) -> tuple[Change, ...]:
        return self.index.changes_since(self.index.epoch, since).changes


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    side = Side()
    running = asyncio.create_task(side.publisher.run(side.call))
    yield side
    running.cancel()
    await asyncio.wait({running})


async def test_queued_keys_travel_together_with_their_last_state(side: Side) -> None:
    side.publisher.enqueue([K1, K2], held=True)
    side.publisher.enqueue([K1, K3], held=False)
    await side.until(lambda: side.counters.batches == 1)
    assert side.changes(1) == (Change("a", 1, K2, K1 + K3, False),)


async def test_withdrawn_keys_wait_for_the_next_held_ones(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "FLUSH_DELAY", 0.0)
    side.publisher.enqueue([K1], held=False)
    for _ in range(10):  # longer than a publication takes
        await asyncio.sleep(0)
    side.publisher.enqueue([K2], held=True)
    await side.until(lambda: side.counters.batches == 1)
    assert side.changes(1) == (Change("a", 1, K2, K1, False),)


async def test_withdrawn_keys_are_published_on_demand(side: Side) -> None:
    side.publisher.enqueue([K1], held=False)
    side.publisher.flush()
    await side.until(lambda: side.counters.batches == 1)
    assert side.changes(1) == (Change("a", 1, b"", K1, False),)


async def test_a_snapshot_follows_a_refused_batch(side: Side) -> None:
    """The one before it was lost."""
    side.pool = {K1}
    side.publisher.last_sequence = 1
    side.publisher.enqueue([K1], held=True)
    await side.until(lambda: side.counters.replacements == 1)
    assert side.changes(1) == (Change("a", 3, K1, b"", True),)
    side.publisher.enqueue([K2], held=True)
    await side.until(lambda: side.counters.batches == 2)
    assert side.index.distinct_keys() == 2


async def test_a_snapshot_replaces_a_queue_that_is_too_long(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "MAX_QUEUED", 2)
    side.pool = {K1}
    side.publisher.enqueue([K1, K2, K3], held=True)
    side.publisher.enqueue([K2, K3], held=False)
    await side.until(lambda: side.counters.replacements == 1)
    assert side.changes(1) == (Change("a", 1, K1, b"", True),)
    assert side.counters.batches == 0


async def test_an_unknown_replica_must_join_again() -> None:
    side = Side()
    side.index.leave("a")
    side.publisher.enqueue([K1], held=True)
    with pytest.raises(NotMemberError, match="does not know 'a'; join again"):
        await side.publisher.run(side.call)


async def test_a_snapshot_that_comes_too_late_is_an_error() -> None:
    """Another replica publishes under this name."""
    side = Side()
    side.index.publish("a", 7, K1, b"", replaces=True)
    with pytest.raises(RuntimeError, match="another replica must not use this incarnation"):
        await side.publisher.send_holdings(side.call)
