"""A router learns of a model's holdings, loads and settings as soon as they change. One that looks
only from time to time misses no load, no departure and no prompt."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import xoscar as xo

from tests.tracker_pools import MODEL, join, let_others_run, of
from tests.tracker_pools import NAMESPACE as NS
from xinference_xavier.protocol.load import (
    Load,
    Observation,
    ReplicaLoad,
    RequestReport,
    Serving,
)
from xinference_xavier.protocol.tracker import (
    Change,
    Left,
    Member,
    NotMemberError,
    Settings,
)
from xinference_xavier.tracker import namespaces as watchers_module
from xinference_xavier.tracker import observers as observers_module
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.tracker.namespaces import Namespaces
from xinference_xavier.tracker.observers import LISTENS_FOR, Loads, Observers

A, B, C, D = (Member(name, "127.0.0.1:1") for name in "abcd")
K1, K2 = b"key 00000001", b"key 00000002"
SERVING = Serving(128, 1 << 20)
LOAD = Load(SERVING, prefill_tokens=100, prefill_s=0.1, requests=1, known=("r",))
PROMPT = RequestReport("r", 100, b"k" * 12)
PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


async def look(tracker: Any, seen: Observation | None = None, timeout: float = 0.0) -> Observation:
    """What is new since `seen`, or everything."""
    epoch, revision, version = "", 0, 0
    if seen is not None:
        version = seen.version
        if seen.update is not None:
            epoch, revision = seen.update.epoch, seen.update.revision
    async with asyncio.timeout(PATIENCE):
        observation: Observation = await tracker.observe(epoch, revision, version, timeout)
    return observation


async def wait_for_news(tracker: Any, seen: Observation | None = None) -> asyncio.Task[Observation]:
    """Begin to wait for something newer than `seen`, or than the current state."""
    seen = seen or await look(tracker)
    task = asyncio.create_task(look(tracker, seen, 10 * PATIENCE))
    await let_others_run()
    assert not task.done()
    return task


async def test_the_first_look_finds_everything(tracker: Any) -> None:
    await tracker.join(NS, A, Settings(), "model-0")
    await join(tracker, B)
    await tracker.publish(NS, "a", 1, K1, b"")
    await tracker.report_load(NS, "a", LOAD)
    settings = await tracker.set_routing("backlog")
    found = await look(tracker)
    assert found.update.news[:3] == (settings, A, B)
    assert Change("a", 1, K1, b"", True) in found.update.news
    (load,) = found.loads
    assert load == ReplicaLoad("a", "model-0", load.age, LOAD)
    assert 0 <= load.age < 60
    assert (found.complete, found.gone, found.requests) == (True, (), ())


async def test_prompts_are_not_kept_while_nobody_looks(tracker: Any) -> None:
    await join(tracker, A)
    await tracker.report_load(NS, "a", LOAD, (PROMPT,))
    assert (await look(tracker)).requests == ()
    await tracker.report_load(NS, "a", LOAD, (PROMPT,))
    assert (await look(tracker)).requests == (PROMPT,)


async def test_without_members_there_is_nothing(tracker: Any) -> None:
    found = await look(tracker)
    assert (found.update, found.complete, found.loads) == (None, True, ())


@pytest.mark.parametrize(
    ("happens", "is_told"),
    [
        (
            lambda tracker: tracker.publish(NS, "a", 2, K2, K1),
            lambda found: of(Change, found.update) == [Change("a", 2, K2, K1, False)],
        ),
        (
            lambda tracker: tracker.report_load(NS, "a", LOAD._replace(requests=2)),
            lambda found: found.loads[0].load.requests == 2,
        ),
        (
            lambda tracker: tracker.report_load(NS, "a", LOAD, (PROMPT,)),
            lambda found: found.requests == (PROMPT,),
        ),
        (
            lambda tracker: tracker.set_routing("off"),
            lambda found: of(Settings, found.update)[0].routing == "off",
        ),
        (
            lambda tracker: tracker.leave(NS, "b"),
            lambda found: (found.update.news, found.gone) == ((Left("b"),), ("b",)),
        ),
        (lambda tracker: join(tracker, D), lambda found: of(Member, found.update) == [D]),
        (
            lambda tracker: tracker.report_load("other", "c", LOAD),
            lambda found: [each.incarnation for each in found.loads] == ["c"],
        ),
    ],
    ids=["publication", "load", "prompt", "setting", "departure", "arrival", "other namespace"],
)
async def test_a_router_that_waits_is_told_at_once(
    tracker: Any,
    happens: Callable[[Any], Awaitable[object]],
    is_told: Callable[[Observation], bool],
) -> None:
    """Requests can be sent to the replicas of all namespaces."""
    await join(tracker, A, B)
    await join(tracker, C, namespace="other")
    await tracker.publish(NS, "a", 1, K1, b"")
    for name in ("a", "b"):
        await tracker.report_load(NS, name, LOAD)
    news = await wait_for_news(tracker)
    await happens(tracker)
    found = await news
    assert not found.complete
    assert is_told(found)


async def test_it_returns_empty_handed_when_its_time_is_over(tracker: Any) -> None:
    await join(tracker, A)
    await tracker.report_load(NS, "a", LOAD)
    seen = await look(tracker)
    again = await look(tracker, seen, 0.01)
    assert (again.update.snapshot, again.update.news) == (False, ())
    assert (again.version, again.complete, again.loads) == (seen.version, False, ())


async def test_changes_soon_after_others_come_together(
    tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await join(tracker, A, B)
    news = await wait_for_news(tracker)
    monkeypatch.setattr(watchers_module, "SPACING_PER_WATCHER", PATIENCE / 20)
    await tracker.report_load(NS, "a", LOAD)
    seen = await news
    await tracker.report_load(NS, "a", LOAD)
    news = await wait_for_news(tracker, seen)
    await tracker.report_load(NS, "b", LOAD)
    await let_others_run()
    assert not news.done()
    found = await look(tracker, seen)
    assert [each.incarnation for each in found.loads] == ["a", "b"], "no wait asked"
    await xo.destroy_actor(tracker)
    with pytest.raises(xo.ActorNotExist):
        await news


class TestTheIndex:
    @pytest.mark.parametrize(
        ("others", "seen"), [((B, C), (B, C)), ((B,), (A,))], ids=["largest", "oldest of equal"]
    )
    async def test_is_that_of_the_largest_namespace_or_the_oldest_of_equal_ones(
        self, tracker: Any, others: tuple[Member, ...], seen: tuple[Member, ...]
    ) -> None:
        await join(tracker, A, namespace="two")
        await join(tracker, *others, namespace="one")
        found = await look(tracker)
        assert tuple(of(Member, found.update)) == seen

    async def test_is_another_one_once_that_is_larger(self, tracker: Any) -> None:
        await join(tracker, A, namespace="one")
        await join(tracker, B, namespace="two")
        await tracker.publish("two", "b", 1, K1, b"")
        news = await wait_for_news(tracker)
        await join(tracker, C, namespace="two")
        found = await news
        assert (found.update.snapshot, of(Member, found.update)) == (True, [B, C])
        assert Change("b", 1, K1, b"", True) in found.update.news

    async def test_of_another_namespace_wakes_nobody(self, tracker: Any) -> None:
        await join(tracker, A, B)
        await join(tracker, C, namespace="other")
        news = await wait_for_news(tracker)
        await tracker.publish("other", "c", 1, K1, b"")
        await let_others_run()
        assert not news.done()
        await tracker.publish(NS, "a", 1, K2, b"")
        found = await news
        assert of(Change, found.update) == [Change("a", 1, K2, b"", False)]


class TestAReplica:
    async def test_reports_only_as_a_member(self, tracker: Any) -> None:
        await join(tracker, A)
        with pytest.raises(NotMemberError, match="'b' is not a member"):
            await tracker.report_load(NS, "b", LOAD)
        assert (await look(tracker)).loads == ()

    async def test_is_gone_when_its_lease_has_ended(self) -> None:
        now = 100.0
        tracker = BlockTracker(MODEL, lease=10.0, tick=1.0, clock=lambda: now)
        await join(tracker, A, B)
        for name in ("a", "b"):
            await tracker.report_load(NS, name, LOAD)
        seen = await look(tracker)
        for second in range(1, 12):
            now = 100.0 + second
            await tracker.heartbeat(NS, "b", {})
            tracker._expire_leases(now)
        found = await look(tracker, seen)
        assert (found.gone, found.loads) == (("a",), ())
        (left,) = (await look(tracker)).loads
        assert (left.incarnation, left.age) == ("b", 11.0)

    async def test_is_not_gone_when_it_changes_its_namespace(self, tracker: Any) -> None:
        """It goes on to serve, so no request need be sent elsewhere."""
        await join(tracker, A, B)
        await tracker.report_load(NS, "a", LOAD)
        seen = await look(tracker)
        await join(tracker, A, namespace="other")
        found = await look(tracker, seen)
        assert (found.gone, found.version) == ((), seen.version)
        assert [each.incarnation for each in (await look(tracker)).loads] == ["a"]


class TestListening:
    async def test_begins_with_the_first_look_and_ends_some_time_after_the_last_one(self) -> None:
        now = 100.0
        tracker = BlockTracker(MODEL, clock=lambda: now)
        await join(tracker, A)
        assert not await tracker.report_load(NS, "a", LOAD)
        await look(tracker)
        assert await tracker.report_load(NS, "a", LOAD)
        now += LISTENS_FOR - 0.1
        assert await tracker.report_load(NS, "a", LOAD)
        now += 0.1
        assert not await tracker.report_load(NS, "a", LOAD)

    async def test_lasts_as_long_as_a_router_waits(self) -> None:
        now = 100.0
        namespaces = Namespaces(MODEL, lease=10.0)
        observers = Observers(namespaces, lambda incarnation: incarnation, lambda: now)
        assert not observers.listening
        version = (await observers.wait("", 0, 0, 0.0)).version
        waiting = asyncio.create_task(observers.wait("", 0, version, PATIENCE))
        await let_others_run()
        now += 10 * LISTENS_FOR
        assert observers.listening
        waiting.cancel()
        await asyncio.wait({waiting})
        assert observers.listening, "it may call again"
        now += LISTENS_FOR
        assert not observers.listening


async def test_a_tracker_that_ends_releases_its_routers_at_once(tracker: Any) -> None:
    """Another one may have taken its place."""
    await join(tracker, A)
    await tracker.report_load(NS, "a", LOAD)
    waiting = await wait_for_news(tracker)
    await xo.destroy_actor(tracker)
    await let_others_run()
    assert waiting.done()
    with pytest.raises(xo.ActorNotExist, match="the tracker of model has ended"):
        await waiting


NAMES = {"a": "model-0", "b": "model-1"}


def load(tokens: int = 0) -> Load:
    return Load(SERVING, prefill_tokens=tokens, prefill_s=None, requests=1)


def prompts(*names: str) -> Sequence[RequestReport]:
    return [RequestReport(name, 100, b"") for name in names]


def news(loads: Loads, seen: int, now: float = 0.0) -> Observation:
    return loads.since(seen, lambda incarnation: NAMES.get(incarnation, incarnation), now)


def reported(found: Observation) -> dict[str, int]:
    """Tokens by incarnation."""
    return {each.incarnation: each.load.prefill_tokens for each in found.loads}


def prompted(found: Observation) -> list[str]:
    return [prompt.request for prompt in found.requests]


@pytest.fixture
def loads() -> Loads:
    return Loads()


def test_a_load_carries_its_replica_s_name_and_its_age(loads: Loads) -> None:
    loads.report("a", load(7), (), now=100.0)
    (found,) = news(loads, 0, now=101.5).loads
    assert found == ReplicaLoad("a", "model-0", 1.5, load(7))
    (found,) = news(loads, 0, now=99.0).loads
    assert found.age == 0.0, "if a clock goes back"


def test_a_look_finds_what_is_newer_than_the_last_one(loads: Loads) -> None:
    loads.report("a", load(1), prompts("p"), now=0.0)
    loads.report("b", load(2), prompts("q", "r"), now=0.0)
    first = news(loads, 0)
    assert (reported(first), prompted(first)) == ({"a": 1, "b": 2}, ["p", "q", "r"])
    assert news(loads, first.version) == Observation(None, first.version, False, (), (), ())
    loads.report("a", load(3), prompts("s"), now=1.0)
    second = news(loads, first.version)
    assert (reported(second), prompted(second), second.complete) == ({"a": 3}, ["s"], False)
    assert news(loads, second.version) == Observation(None, second.version, False, (), (), ())


def test_a_replica_that_left_and_reported_again_is_both(loads: Loads) -> None:
    """What was sent to it before is lost."""
    loads.report("a", load(1), (), now=0.0)
    seen = loads.version
    loads.forget("a")
    loads.report("a", load(2), (), now=0.0)
    found = news(loads, seen)
    assert (found.gone, reported(found)) == (("a",), {"a": 2})


def test_one_that_has_not_reported_cannot_be_gone(loads: Loads) -> None:
    seen = loads.version
    loads.forget("a")
    assert news(loads, seen) == Observation(None, seen, False, (), (), ())


@pytest.mark.parametrize("seen", ["nothing", "an earlier tracker", "a later tracker"])
def test_who_has_followed_another_tracker_gets_everything(loads: Loads, seen: str) -> None:
    """The members that are missing have left."""
    first = loads.version
    loads.report("a", load(1), prompts("p"), now=0.0)
    loads.report("b", load(2), (), now=0.0)
    loads.forget("b")
    last = loads.version
    version = {"nothing": 0, "an earlier tracker": first - 1, "a later tracker": last + 1}[seen]
    found = news(loads, version)
    assert (found.version, found.complete, found.gone) == (last, True, ())
    assert (reported(found), prompted(found)) == ({"a": 1}, ["p"])


def test_a_later_tracker_counts_on_from_above(loads: Loads) -> None:
    for _ in range(100):
        loads.report("a", load(), (), now=0.0)
    assert Loads().version > loads.version


def test_the_latest_prompts_are_remembered_as_far_as_they_fit(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers_module, "_REQUEST_BYTES", 4)
    monkeypatch.setattr(observers_module, "MAX_REQUEST_BYTES", 32)
    for name, chunks in {"p": 1, "q": 1, "r": 1, "s": 2, "t": 0}.items():
        loads.report("a", load(), [RequestReport(name, 100, chunks * b"k" * 12)], now=0.0)
    assert prompted(news(loads, 0)) == ["s", "t"]
    loads.report("a", load(), [RequestReport("u", 100, b"k" * 12)], now=0.0)
    assert prompted(news(loads, 0)) == ["t", "u"]
