"""The scheduler thread posts work to the background loop, within a limit."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from xinference_xavier.mirror.mirror import Mirror
from xinference_xavier.pool.pool import Pool
from xinference_xavier.protocol.tracker import Change, Member, Settings, Update
from xinference_xavier.replica import peer_tier as module
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.peer_tier import PeerTier

NEVER = math.inf
ROWS = 8


def test_work_for_a_suspended_background_loop_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Further work is refused and counted, and the scheduler thread goes on."""
    monkeypatch.setattr(module, "MAX_BACKLOG", 3)
    pool, calls = Pool(ROWS), []
    publisher = SimpleNamespace(enqueue=lambda keys, held: calls.append(keys))
    replica: Any = SimpleNamespace(publisher=publisher, add=calls.append, start=calls.append)
    tier = PeerTier(pool, Mirror("still"), SharedNamespace("namespace", lambda _: replica))
    loop = asyncio.new_event_loop()

    async def open_tier() -> None:
        tier.open(replica, replica, replica, replica, replica)

    loop.run_until_complete(open_tier())  # and now it is suspended
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
    assert calls == [[b"gone"], [], [], []], "a withdrawal comes before what may publish it again"
    tier.on_stored([])
    assert tier.refused == 2, "there is room again"
    loop.close()


async def test_a_peer_that_does_not_serve_is_no_source() -> None:
    mirror = Mirror("own")
    changes = tuple(Change(name, 1, b"key1", b"", False) for name in "abc")
    members = (Member("a", "h:1"), Member("b", "h:1", serves=False), Member("c", "h:1"))
    mirror.apply(Update(1, "epoch", True, Settings(), 4, members, changes))
    tier = PeerTier(Pool(ROWS), mirror, SharedNamespace("namespace", lambda _: nothing))
    nothing: Any = SimpleNamespace()
    mirror.trust(frozenset("ab"))
    tier.open(nothing, nothing, nothing, nothing, nothing)
    assert tier.sources(tier.holders(b"key1")) == ["a"]
    assert tier.holders(b"key2") == 0
    assert tier.sources(tier.set_of(["b", "stranger"])) == ["b"]
