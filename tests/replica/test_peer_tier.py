"""The scheduler thread posts work to the background loop, within a limit."""

import asyncio
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from xinference_xavier.mirror import Mirror
from xinference_xavier.pool.pool import Pool, Row
from xinference_xavier.pool.tier import Claim, Fetch
from xinference_xavier.protocol.tracker import Change, Member, Settings, Update
from xinference_xavier.protocol.transfer import Grant, GrantRequest, PullOrder, PullResult, Ticket
from xinference_xavier.replica import peer_tier as module
from xinference_xavier.replica.fetcher import Fetcher, PeerFetch
from xinference_xavier.replica.namespace import SharedNamespace
from xinference_xavier.replica.peer_tier import GATHER, Background, PeerTier

NEVER = math.inf
ROWS = 8


class Loop:
    """The background loop of a tier, which runs only when it is told to, and what it was given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        publisher = SimpleNamespace(enqueue=lambda keys, held: self.calls.append(keys))
        replica: Any = SimpleNamespace(
            publisher=publisher,
            add=self.calls.append,
            start=self.calls.append,
            claim=self._call,
            release=self._call,
            trusts_all=True,
            ready=True,
        )
        self.pool = Pool(ROWS)
        self.mirror = Mirror("own")
        self.tier = PeerTier(self.pool, self.mirror)
        self._loop = asyncio.new_event_loop()
        self._now = 0.0
        self._numbers = itertools.count()
        self._loop.time = lambda: self._now  # type: ignore[method-assign]

        namespace = SharedNamespace("namespace", lambda _: replica)
        self.background = Background(
            self._loop, replica, replica, replica, replica, replica, namespace
        )
        self.tier.open(self.background)

    async def _call(self, claim: Claim) -> None:
        self.calls.append(claim)

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


class Fetching:
    """A fetcher. Its `donor` grants all that it is asked for, and the rows arrive when `arrive` is
    set; a move to another namespace ends when `moved` is set."""

    def __init__(self) -> None:
        self.pool = Pool(ROWS)
        self.moved, self.pulling, self.arrive = (asyncio.Event() for _ in range(3))
        self.namespace = SharedNamespace("namespace", lambda _: self.moved.wait())  # type: ignore[arg-type]
        self.rolled_back: list[str] = []
        self.donor: Any = SimpleNamespace(grant=self._grant, release=self._release)
        self.canary: Any = SimpleNamespace(
            trusts=lambda _: True, differing=set(), doubt=lambda _: None
        )
        process: Any = SimpleNamespace(pull=self._pull)
        self.fetcher = Fetcher(
            incarnation="own",
            pool=self.pool,
            row_bytes=1,
            process=process,
            namespace=self.namespace,
            mirror=Mirror("own"),
            canary=self.canary,
            disk=None,
            arrived=lambda rows: None,
            rolled_back=lambda fetch, reason: self.rolled_back.append(reason),
        )

    def fetch(self) -> asyncio.Future[None]:
        rows = self.pool.reserve([b"key"], redundant=None).rows
        deadline = asyncio.get_running_loop().time() + 60.0
        return self.fetcher.start(PeerFetch("donor", rows, deadline))

    async def _grant(self, request: GrantRequest) -> Grant:
        count = len(request.keys)
        ticket = Ticket.sign(b"key", request.consumer, range(count), 1.0)
        return Grant(1, (0,) * count, ticket, "127.0.0.1:1", None, False, 1)

    async def _release(self, grant_id: int) -> None:
        pass

    async def _pull(self, order: PullOrder) -> PullResult:
        self.pulling.set()
        await self.arrive.wait()
        return PullResult(len(order.slots), None, "gloo")


@pytest.fixture
async def fetching() -> Fetching:
    return Fetching()


async def test_nothing_is_fetched_between_a_reset_and_the_move_to_another_namespace(
    fetching: Fetching,
) -> None:
    """A row that a warm join reserves just after the pool was reset would get the old weights'
    bytes."""
    fetching.namespace.announce_reset()
    fetching.pool.reset()
    isolating = asyncio.ensure_future(fetching.namespace.isolate())
    await fetching.fetch()
    fetching.moved.set()
    await isolating
    await fetching.fetch()
    assert fetching.rolled_back == ["reset", "donor gone"], "then it knows no peers"
    assert fetching.pool.counts().filling == 0


@pytest.mark.parametrize(
    ("meanwhile", "reason"),
    [
        ("nothing", None),
        ("parted", "not compared"),
        ("differs", "not compared"),
        ("reset", "reset"),
    ],
)
async def test_rows_are_used_if_on_arrival_their_donor_is_still_known_to_compute_the_same(
    fetching: Fetching, meanwhile: str, reason: str | None
) -> None:
    fetching.fetcher._donors["donor"] = fetching.donor
    fetching.moved.set()
    ended = fetching.fetch()
    await fetching.pulling.wait()
    match meanwhile:
        case "parted":
            await fetching.namespace.part()
        case "differs":
            fetching.canary.differing.add("donor")
        case "reset":
            fetching.pool.reset()
    fetching.arrive.set()
    await ended
    assert fetching.rolled_back == ([] if reason is None else [reason])
    assert (fetching.pool.lookup(b"key") is None) == (reason is not None)
    assert fetching.pool.counts().filling + fetching.pool.counts().quarantined == 0


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_work_for_a_suspended_background_loop_is_bounded(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further work is refused and counted, and the scheduler thread goes on."""
    monkeypatch.setattr(module, "MAX_BACKLOG", 3)
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
    loop.mirror.apply(Update(1, "epoch", True, Settings(), 4, (Member("peer", "h:1"),), ()))
    claim = loop.tier.claim([b"first", b"last"], 1.0)
    loop.run()
    assert loop.calls[1:] == [claim]
    loop.calls.clear()
    last = loop.store(b"last")
    loop.tier.release_claim(claim)
    loop.run()
    assert loop.calls == [[last], claim]


def test_a_chunk_that_is_stored_again_is_withdrawn_before_it_is_offered(loop: Loop) -> None:
    loop.store(b"other")
    loop.run()
    loop.calls.clear()
    loop.tier.on_evicted([b"key"])
    again = loop.store(b"key")
    loop.run(GATHER)
    assert loop.calls == [[b"key"], [again]]


async def test_a_peer_that_does_not_serve_is_no_source() -> None:
    mirror = Mirror("own")
    changes = tuple(Change(name, 1, b"key1", b"", False) for name in "abc")
    members = (Member("a", "h:1"), Member("b", "h:1", serves=False), Member("c", "h:1"))
    mirror.apply(Update(1, "epoch", True, Settings(), 4, members, changes))
    tier = PeerTier(Pool(ROWS), mirror)
    mirror.trust(frozenset("ab"))
    assert tier.sources(tier.holders(b"key1")) == ["a"]
    assert tier.holders(b"key2") == 0
    assert tier.sources(tier.set_of(["b", "stranger"])) == ["b"]
