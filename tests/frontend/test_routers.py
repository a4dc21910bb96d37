"""Routers follow the trackers of their models, whatever happens to these."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import xoscar as xo

from tests.frontend.cluster import SERVING
from tests.tracker_pools import MODEL, NAMESPACE, create_tracker, join, let_others_run
from xinference_xavier.errors import NotFoundError
from xinference_xavier.frontend import model_router as module
from xinference_xavier.frontend.model_router import ModelRouter, Routers
from xinference_xavier.protocol.load import Load
from xinference_xavier.protocol.tracker import Member, tracker_uid

A = Member("a", "127.0.0.1:1")
LOAD = Load(SERVING, 0, 0.0, 0, rates=(0.001, 0.0, 0.01, 1e-9))
PATIENCE = 30.0
"""Seconds after which a test that waits has failed."""


class Followed(Routers):
    """Routers of the model whose tracker is at `address`."""

    def __init__(self, address: str) -> None:
        super().__init__(self.find_tracker)
        self.address = address
        self.asked = 0
        self.observed = asyncio.Event()

    async def find_tracker(self, model_uid: str) -> Any:
        self.asked += 1
        if model_uid != MODEL:
            raise NotFoundError(f"model {model_uid!r} does not share its cache here")
        return await xo.actor_ref(address=self.address, uid=tracker_uid(model_uid))

    async def router(self, ready: Callable[[ModelRouter], bool]) -> ModelRouter:
        """The model's router once it is `ready`."""
        async with asyncio.timeout(PATIENCE):
            while (found := self.get(MODEL)) is None or not ready(found):
                await self.observed.wait()
                self.observed.clear()
        return found


def routes(router: ModelRouter) -> bool:
    return router.report()["loads"] != {}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_BACKOFF", 0.01)
    monkeypatch.setattr(module, "_MAX_BACKOFF", 0.01)


@pytest.fixture
async def routers(pool: Any, monkeypatch: pytest.MonkeyPatch) -> Followed:
    routers = Followed(pool.external_address)
    observe = module.observe

    async def noticed(tracker: Any, router: ModelRouter) -> bool:
        same = await observe(tracker, router)
        routers.observed.set()
        return same

    monkeypatch.setattr(module, "observe", noticed)
    return routers


async def report(tracker: Any, load: Load = LOAD) -> None:
    await tracker.report_load(NAMESPACE, "a", load)


@pytest.fixture
async def router(tracker: Any, routers: Followed) -> ModelRouter:
    """The router of the model, which has one replica."""
    await join(tracker, A)
    await report(tracker)
    return await routers.router(routes)


async def test_the_first_request_begins_to_look_for_the_model(
    tracker: Any, routers: Followed
) -> None:
    await join(tracker, A)
    await report(tracker)
    assert routers.get(MODEL) is None
    router = await routers.router(routes)
    found = await router.route()
    assert found is not None
    assert found.choice.replica == "a"
    assert routers.get(MODEL) is router


async def test_a_router_learns_of_loads_and_members(
    tracker: Any, routers: Followed, router: ModelRouter
) -> None:
    await report(tracker, LOAD._replace(prefill_s=9.0))
    await routers.router(lambda router: router.report()["loads"]["a"]["backlog_s"] > 1.0)
    await tracker.leave(NAMESPACE, "a")
    await routers.router(lambda router: not routes(router))
    assert await router.route() is None


async def test_a_model_that_does_not_share_is_not_looked_for_at_each_request(
    routers: Followed,
) -> None:
    for _ in range(50):
        assert routers.get("another") is None
        await asyncio.sleep(0)
    assert routers.asked == 1


async def test_a_tracker_that_is_replaced_has_a_router_of_its_own(
    tracker: Any, routers: Followed, router: ModelRouter
) -> None:
    """The model may have been terminated and launched again, differently."""
    await xo.destroy_actor(tracker)
    successor = await create_tracker(routers.address)
    await join(successor, A)
    await report(successor, LOAD._replace(serving=SERVING._replace(routing="off")))
    again = await routers.router(lambda router: router.routing == "off")
    assert again is not router
    assert await again.route() is None
    assert await router.route() is None


async def test_a_tracker_that_cannot_be_reached_for_a_while_keeps_its_router(
    tracker: Any, routers: Followed, router: ModelRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, observe, failed = routers._find, module.observe, asyncio.Event()

    async def unreachable(model_uid: str) -> Any:
        routers._find = find
        failed.set()
        raise ConnectionRefusedError("nobody listens")

    async def broken(tracker: Any, router: ModelRouter) -> bool:
        monkeypatch.setattr(module, "observe", observe)
        routers._find = unreachable
        raise ConnectionResetError("the connection broke")

    monkeypatch.setattr(module, "observe", broken)
    await report(tracker)
    await failed.wait()
    await report(tracker, LOAD._replace(prefill_s=9.0))
    again = await routers.router(lambda router: router.report()["loads"]["a"]["backlog_s"] > 1.0)
    assert again is router
    assert router.counts.failures == 2


async def test_without_news_of_a_tracker_requests_wait_no_longer_than_its_replicas_are_known(
    tracker: Any, routers: Followed, router: ModelRouter
) -> None:
    await report(tracker, LOAD._replace(requests=1, serving=SERVING._replace(request_limit=1)))
    await routers.router(lambda router: not router.report()["loads"]["a"]["accepts"])
    waiting = asyncio.create_task(router.route())
    await asyncio.sleep(0)
    assert router.report()["waiting"] == 1
    clock = router._clock
    router._clock = lambda: clock() + 10.0
    await xo.destroy_actor(tracker)
    assert await waiting is None


async def test_a_model_that_has_ended_is_forgotten(
    tracker: Any, routers: Followed, router: ModelRouter
) -> None:
    async def nothing(model_uid: str) -> Any:
        raise NotFoundError("it has ended")

    await report(tracker, LOAD._replace(requests=1, serving=SERVING._replace(request_limit=1)))
    await routers.router(lambda router: not router.report()["loads"]["a"]["accepts"])
    waiting = asyncio.create_task(router.route())
    await asyncio.sleep(0)
    assert router.report()["waiting"] == 1
    routers._find = nothing
    (following,) = (task for task in asyncio.all_tasks() if "Routers._run" in str(task))
    await xo.destroy_actor(tracker)
    await following
    assert routers.get(MODEL) is None
    assert await waiting is None


async def test_a_router_that_ends_leaves_no_watch_open(
    tracker: Any, routers: Followed, router: ModelRouter
) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await tracker.status())["watches"] != 1:
            await let_others_run()
        await routers.close()
        while (await tracker.status())["watches"] != 0:
            await let_others_run()
