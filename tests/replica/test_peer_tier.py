"""What the scheduler thread leaves to a background loop, and what becomes of it."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from xinference_xavier.pool.pool import Pool
from xinference_xavier.replica import peer_tier as module
from xinference_xavier.replica.mirror import Mirror
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.peer_tier import PeerTier

NEVER = math.inf
ROWS = 8


def test_a_background_loop_that_stands_still_is_not_buried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it cannot take is refused and counted, and the scheduler thread goes on."""
    monkeypatch.setattr(module, "MAX_BACKLOG", 3)
    pool, taken = Pool(ROWS), []
    inside: Any = SimpleNamespace(add=taken.append, withdraw=taken.append, start=taken.append)
    tier = PeerTier(pool, Mirror("still"), SharedNamespace("namespace", lambda _: inside))
    loop = asyncio.new_event_loop()

    async def open_tier() -> None:
        tier.open(inside, inside, inside, inside)

    loop.run_until_complete(open_tier())  # and now it stands still
    tier.on_stored([])
    tier.on_evicted([b"gone"])
    tier.on_stored([])
    tier.on_stored([])
    rows = pool.reserve([b"key"]).rows
    assert tier.submit_load("donor", rows, NEVER) is None
    assert pool.counts().filling == 0, "the rows are free again"
    tier.on_stored([])
    assert tier.refused == 2
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert taken == [[b"gone"], [], [], []], "what is gone is told before what may bring it back"
    tier.on_stored([])
    assert tier.refused == 2, "there is room again"
    loop.close()
