"""Rows are fetched only from replicas that compute the same, and used only if they still do on
arrival. What holds for each source of rows is in `test_sources.py`."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.comparisons import compared, compared_index
from tests.replica.consumers import Consumer
from tests.tracker_pools import let_others_run
from xinference_xavier.pool.pool import Pool, flush
from xinference_xavier.pool.region import Region
from xinference_xavier.protocol.tracker import Comparison, Left, Member, News, Update, Verdict
from xinference_xavier.protocol.transfer import Endpoint, Grant, GrantRequest, PullOrder, PullResult


class Fetching(Consumer):
    """Its `donor` grants all that it is asked for, and the rows arrive when `arrive` is set; a
    session with the tracker ends when `may_end` is set."""

    source = "donor"

    def __init__(self) -> None:
        super().__init__(Region.create(8, 4096), Pool(8), compared_index("own"), self._pull)
        self.may_end, self.pulling, self.arrive = (asyncio.Event() for _ in range(3))
        self.donor: Any = SimpleNamespace(grant=self._grant, release=self._release)

    async def session(self, _: str) -> None:
        """Ends only when it may."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()

    def update(self, *news: News) -> None:
        self.index.apply(Update(1, "epoch", False, news))
        for peer in self.index.members.values():
            peer.actor = self.donor

    def meet_donor(self) -> None:
        self.update(compared("donor"))

    async def _grant(self, request: GrantRequest) -> Grant:
        slots = tuple(range(len(request.keys)))
        endpoint = Endpoint("127.0.0.1:1")
        return Grant(slots, (0,) * len(slots), 1.0, endpoint, False, 1)

    async def _release(self, consumer: str, number: int) -> None:
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
    session = asyncio.ensure_future(fetching.namespace.run_session(fetching.session))
    await let_others_run()
    fetching.namespace.announce_reset()
    fetching.pool.reset()
    isolating = asyncio.ensure_future(fetching.namespace.isolate())
    await fetching.fetch([b"key"])
    fetching.may_end.set()
    await asyncio.gather(isolating, session)
    await fetching.fetch([b"key"])
    assert fetching.rolled_back == ["reset", "donor gone"], "then it knows no peers"
    assert fetching.pool.counts().filling == 0


async def test_a_donor_that_was_not_compared_is_asked_for_nothing(fetching: Fetching) -> None:
    fetching.update(Member("donor", "host:1"))
    fetching.arrive.set()
    await fetching.fetch([b"key"])
    assert fetching.rolled_back == ["not compared"]
    assert not fetching.pulling.is_set()


@pytest.mark.parametrize(
    ("meanwhile", "reason"),
    [
        ("nothing", None),
        ("what was fetched is in doubt", "reset"),
        ("differs", "not compared"),
        ("reset", "reset"),
    ],
)
async def test_rows_are_used_if_on_arrival_their_donor_is_still_known_to_compute_the_same(
    fetching: Fetching, meanwhile: str, reason: str | None
) -> None:
    fetching.meet_donor()
    _, ended = fetching.begin([b"key"])
    await fetching.pulling.wait()
    match meanwhile:
        case "what was fetched is in doubt":
            flush(fetching.pool, lambda row: row.origin is not None)
        case "differs":
            fetching.update(Left("donor", Comparison(Verdict.DIFFERS)))
        case "reset":
            fetching.pool.reset()
    fetching.arrive.set()
    await ended
    assert fetching.rolled_back == ([] if reason is None else [reason])
    assert (fetching.pool.lookup(b"key") is None) == (reason is not None)
    assert fetching.pool.counts().filling + fetching.pool.counts().quarantined == 0
