"""The scheduler thread posts work to the background loop, within a limit."""

import asyncio
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.comparisons import compared, compared_index, snapshot
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.protocol.tracker import Member
from xinference_xavier.replica import peer_tier as module
from xinference_xavier.replica.disk import NoDisk
from xinference_xavier.replica.fetcher import Fetch
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.peer_tier import GATHER, Background, PeerTier
from xinference_xavier.replica.reports import Publisher
from xinference_xavier.replica.tracker_client import Claim

NEVER = math.inf
ROWS = 8


class Loop:
    """The background loop of a tier, which runs only when it is told to, and what it was given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.pool = Pool(ROWS)
        publisher = Publisher("own", self.pool)
        publisher.enqueue = lambda keys, held: self.calls.append(keys)  # type: ignore[method-assign]
        replica: Any = SimpleNamespace(
            publisher=publisher,
            add=self.calls.append,
            start=self.calls.append,
            claim=self._call,
            release=self._call,
            reset=lambda: self.calls.append("comparisons are void"),
            ready=True,
        )
        self.index = compared_index("own")
        self.tier = PeerTier(self.pool, self.index, NoDisk())
        self._loop = asyncio.new_event_loop()
        self._now = 0.0
        self._numbers = itertools.count()
        self._loop.time = lambda: self._now  # type: ignore[method-assign]

        namespace = SharedNamespace("namespace", self.index, NoDisk())
        self.background = Background(
            self._loop, replica, replica, replica, replica, replica, namespace
        )
        self.tier.open(self.background)

    async def _call(self, what: Claim) -> None:
        self.calls.append(what)

    def fetch(self) -> Fetch | None:
        """A fetch of a chunk that no other one brings."""
        rows = self.pool.reserve([b"key %d" % next(self._numbers)]).rows
        return self.tier.submit_load("donor", rows, NEVER)

    def store(self, key: bytes) -> Row:
        (row,) = self.pool.reserve([key]).rows
        self.pool.commit(row)
        self.tier.on_stored([row])
        return row

    def run(self, seconds: float = 0.0) -> None:
        """What is due this many seconds later."""
        self._now += seconds
        self._loop.call_soon(self._loop.call_soon, self._loop.stop)
        self._loop.run_forever()

    def close(self) -> None:
        self._loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_work_for_a_suspended_background_loop_is_bounded(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further work is refused and counted, and the scheduler thread goes on."""
    monkeypatch.setattr(module, "LIMIT", 3)
    fetches = [loop.fetch() for _ in range(3)]
    loop.tier.on_evicted([b"gone"])
    filling = loop.pool.counts().filling
    assert loop.fetch() is None
    assert loop.pool.counts().filling == filling, "its rows are free again"
    assert loop.background.refused == 1
    loop.run()
    assert loop.calls == [[b"gone"], *fetches]
    assert loop.fetch() is not None, "there is room again"
    assert loop.background.refused == 1


def test_stored_rows_that_a_suspended_loop_does_not_take_are_bounded(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 1)
    row = loop.store(b"one")
    loop.store(b"two")
    assert loop.background.refused == 1
    loop.run()
    assert loop.calls == [[row]]


def test_rows_stored_soon_after_others_are_published_together(loop: Loop) -> None:
    first = loop.store(b"first")
    loop.run()
    assert loop.calls == [[first]], "after a quiet time at once"
    loop.calls.clear()
    second = loop.store(b"second")
    loop.run(0.25 * GATHER)
    third = loop.store(b"third")
    loop.run(0.5 * GATHER)
    assert loop.calls == []
    loop.run(0.25 * GATHER)
    assert loop.calls == [[second, third]]
    loop.calls.clear()
    fourth = loop.store(b"fourth")
    loop.run(GATHER)
    assert loop.calls == [[fourth]], "the next ones, too"


def test_a_claim_is_made_where_there_are_peers_and_released_after_its_last_chunks_are_offered(
    loop: Loop,
) -> None:
    loop.store(b"first")
    assert loop.tier.claim([b"first", b"last"], 1.0) is None
    loop.index.apply(snapshot(compared("peer")))
    claim = loop.tier.claim([b"first", b"last"], 1.0)
    loop.run()
    assert loop.calls[1:] == [claim]
    loop.calls.clear()
    last = loop.store(b"last")
    loop.tier.release_claim(claim)
    loop.run()
    assert loop.calls == [[last], claim]


def test_a_reset_ends_sharing_before_it_frees_rows_and_until_the_replica_is_alone(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is free before could get what peers with the old weights still send, and peers
    that ask meanwhile would get what the new ones compute."""
    reset, namespace, sharing = loop.pool.reset, loop.background.namespace, list[bool]()
    monkeypatch.setattr(loop.pool, "reset", lambda: (sharing.append(loop.tier.sharing), reset()))
    loop.tier.reset()
    assert (sharing, loop.tier.sharing) == ([False], False)
    loop.run()
    assert namespace.current.startswith("namespace+")
    assert (loop.calls, loop.tier.sharing) == (["comparisons are void"], True)


def test_a_chunk_that_is_stored_again_is_withdrawn_before_it_is_offered(loop: Loop) -> None:
    loop.store(b"other")
    loop.run()
    loop.calls.clear()
    loop.tier.on_evicted([b"key"])
    again = loop.store(b"key")
    loop.run(GATHER)
    assert loop.calls == [[b"key"], [again]]


async def test_a_peer_that_does_not_serve_is_no_source() -> None:
    index, key, other = compared_index("own"), b"key 00000001", b"key 00000002"
    members = (compared("a"), compared("b", serves=False), Member("c", "h:1"))
    index.apply(snapshot(*members, a=[key], b=[key], c=[key]))
    tier = PeerTier(Pool(ROWS), index, NoDisk())
    assert tier.peers.names(tier.holders(key)) == ["a"]
    assert tier.holders(other) == 0
