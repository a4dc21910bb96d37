"""A reset moves a replica to a namespace of its own, and a version reunites it with others."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.harness.comparisons import compared, snapshot
from tests.tracker_pools import let_others_run
from xinference_xavier.index import Index
from xinference_xavier.peers import Peers
from xinference_xavier.replica.disk import Disk, NoDisk
from xinference_xavier.replica.namespace import SharedNamespace


class Tracker:
    """Runs one session in each namespace, which ends when the test lets it."""

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.begun, self.ending = asyncio.Event(), asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def session(self, namespace: str) -> None:
        self.sessions.append(namespace)
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ending.set()
            await self.may_end.wait()

    async def run(self, namespace: SharedNamespace) -> None:
        while True:
            await namespace.run_session(self.session)


def make(disk: Disk | None = None) -> SharedNamespace:
    return SharedNamespace("own", Index(Peers("incarnation")), disk or NoDisk())


@pytest.fixture
def namespace() -> SharedNamespace:
    return make()


@pytest.fixture
async def tracker(namespace: SharedNamespace) -> AsyncIterator[Tracker]:
    tracker = Tracker()
    running = asyncio.create_task(tracker.run(namespace))
    await tracker.begun.wait()
    yield tracker
    tracker.may_end.set()
    running.cancel()
    await asyncio.wait({running})


async def reset(namespace: SharedNamespace) -> None:
    namespace.announce_reset()
    await namespace.isolate()


def test_without_a_reset_it_is_the_engines_own(namespace: SharedNamespace) -> None:
    assert namespace.current == "own"
    assert namespace.resets_done
    assert namespace.durable == "own"


async def test_each_reset_makes_another_one(namespace: SharedNamespace, tracker: Tracker) -> None:
    await reset(namespace)
    first = namespace.current
    await let_others_run()
    await reset(namespace)
    assert len({"own", first, namespace.current}) == 3
    assert tracker.sessions == ["own", first]
    assert namespace.durable is None


async def test_resets_that_are_announced_before_the_move_are_one(
    namespace: SharedNamespace, tracker: Tracker
) -> None:
    tracker.may_end.clear()
    for _ in range(2):
        namespace.announce_reset()
    moving = asyncio.create_task(namespace.isolate())
    await tracker.ending.wait()
    namespace.announce_reset()
    tracker.may_end.set()
    await moving
    assert not namespace.resets_done, "the third one came later"
    first = namespace.current
    await namespace.isolate()
    assert namespace.resets_done
    second = namespace.current
    await namespace.isolate()
    assert "own" != first != second == namespace.current


async def test_the_same_version_is_the_same_namespace(namespace: SharedNamespace) -> None:
    other = make()
    for each in (namespace, other):
        await reset(each)
        assert await each.rejoin("step 7", resets=1)
    assert namespace.current == other.current != "own"
    assert namespace.durable == namespace.current


async def test_a_version_without_a_reset_changes_nothing(namespace: SharedNamespace) -> None:
    assert not await namespace.rejoin("step 7", resets=0)
    assert namespace.current == "own"


async def test_a_change_forgets_peers_after_the_session_that_told_of_them() -> None:
    index, begun = Index(Peers("incarnation")), asyncio.Event()
    namespace = SharedNamespace("own", index, NoDisk())

    async def session(_: str) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            index.apply(snapshot(compared("peer")))

    running = asyncio.create_task(namespace.run_session(session))
    await begun.wait()
    await namespace.part("own", "own~1")
    assert not index.members
    await running


async def test_the_disk_has_the_store_of_what_engines_with_these_weights_have_in_common() -> None:
    moves: list[str | None] = []
    disk = NoDisk()
    disk.move = moves.append  # type: ignore[method-assign]
    namespace = make(disk)
    await namespace.part("own", "own~1")
    await reset(namespace)
    await namespace.rejoin("step 7", resets=1)
    assert moves == ["own", "own", None, "own@step 7"]


async def test_a_version_waits_for_the_reset_before_it(
    namespace: SharedNamespace, tracker: Tracker
) -> None:
    tracker.may_end.clear()
    namespace.announce_reset()
    parting = asyncio.create_task(namespace.isolate())
    joining = asyncio.create_task(namespace.rejoin("step 7", resets=1))
    await tracker.ending.wait()
    assert namespace.current != "own@step 7"
    tracker.may_end.set()
    await parting
    assert await joining
    assert namespace.current == "own@step 7"


async def test_a_version_that_another_reset_follows_is_not_taken(
    namespace: SharedNamespace,
) -> None:
    """The weights have another name since."""
    namespace.announce_reset()
    namespace.announce_reset()
    await namespace.isolate()
    assert not await namespace.rejoin("step 7", resets=1)


async def test_vllm_s_names_of_weights_may_be_any_text(namespace: SharedNamespace) -> None:
    """One with a tilde would be taken for a part of another version's namespace."""
    names = set[str]()
    for version in ("", "7" * 65, "7~1"):
        await reset(namespace)
        assert await namespace.rejoin(version, namespace.announced)
        names.add(namespace.current)
    assert len(names) == 3
    assert not any("~" in name for name in names)
    assert max(map(len, names)) < 100
