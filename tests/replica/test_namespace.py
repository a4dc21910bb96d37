"""A reset moves a replica to a namespace of its own, and a version reunites it with others."""

import asyncio

import pytest

from xinference_xavier.replica.namespace import SharedNamespace


class Tracker:
    """Records our moves, and answers when the test lets it."""

    def __init__(self) -> None:
        self.moves: list[str] = []
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def move(self, namespace: str) -> None:
        self.moves.append(namespace)
        self.asked.set()
        await self.may_answer.wait()


@pytest.fixture
def tracker() -> Tracker:
    return Tracker()


@pytest.fixture
def namespace(tracker: Tracker) -> SharedNamespace:
    return SharedNamespace("own", tracker.move)


async def reset(namespace: SharedNamespace) -> None:
    namespace.announce_reset()
    await namespace.isolate()


def test_without_a_reset_it_is_the_engines_own(namespace: SharedNamespace) -> None:
    assert namespace.current == "own"
    assert namespace.is_settled
    assert namespace.lasting == "own"


async def test_each_reset_makes_another_one(namespace: SharedNamespace, tracker: Tracker) -> None:
    await reset(namespace)
    first = namespace.current
    await reset(namespace)
    assert len({"own", first, namespace.current}) == 3
    assert tracker.moves == [first, namespace.current]
    assert namespace.lasting is None


async def test_resets_that_are_announced_before_the_move_are_one(
    namespace: SharedNamespace, tracker: Tracker
) -> None:
    tracker.may_answer.clear()
    for _ in range(2):
        namespace.announce_reset()
    moving = asyncio.create_task(namespace.isolate())
    await tracker.asked.wait()
    namespace.announce_reset()
    tracker.may_answer.set()
    await moving
    assert not namespace.is_settled, "the third one came later"
    for _ in range(2):
        await namespace.isolate()
    assert namespace.is_settled
    assert len(tracker.moves) == 2


async def test_the_same_version_is_the_same_namespace(namespace: SharedNamespace) -> None:
    other = SharedNamespace("own", Tracker().move)
    for each in (namespace, other):
        await reset(each)
        assert await each.rejoin("step 7", resets=1)
    assert namespace.current == other.current != "own"
    assert namespace.lasting == namespace.current


async def test_a_version_without_a_reset_changes_nothing(
    namespace: SharedNamespace, tracker: Tracker
) -> None:
    assert not await namespace.rejoin("step 7", resets=0)
    assert (namespace.current, tracker.moves) == ("own", [])


async def test_a_version_waits_for_the_reset_before_it(
    namespace: SharedNamespace, tracker: Tracker
) -> None:
    tracker.may_answer.clear()
    namespace.announce_reset()
    parting = asyncio.create_task(namespace.isolate())
    joining = asyncio.create_task(namespace.rejoin("step 7", resets=1))
    await tracker.asked.wait()
    assert namespace.current != "own@step 7"
    tracker.may_answer.set()
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
    names = set[str]()
    for version in ("", "7" * 65, "7" * 66):
        await reset(namespace)
        assert await namespace.rejoin(version, namespace.announced)
        names.add(namespace.current)
    assert len(names) == 3
    assert max(map(len, names)) < 100
