"""A tracker in this process, and calls to it."""

import asyncio
from typing import Any, TypeVar

import xoscar as xo

from xinference_xavier.protocol.tracker import Member, News, Settings, Update, tracker_uid
from xinference_xavier.tracker.actor import BlockTracker

T = TypeVar("T", bound=News)
MODEL = "model"
NAMESPACE = "namespace"


async def create_tracker(address: str, model_uid: str = MODEL, **arguments: Any) -> Any:
    uid = tracker_uid(model_uid)
    return await xo.create_actor(BlockTracker, model_uid, address=address, uid=uid, **arguments)


async def join(tracker: Any, *members: Member, namespace: str = NAMESPACE) -> Any:
    for member in members:
        reply = await tracker.join(namespace, member, Settings())
    return reply


async def look(tracker: Any, watcher: str, namespace: str = NAMESPACE) -> Update:
    """The current state."""
    update: Update = await tracker.watch(namespace, watcher, "", 0, 0.0)
    return update


def of(kind: type[T], update: Update) -> list[T]:
    """The update's news of this kind."""
    return [news for news in update.news if isinstance(news, kind)]


async def wait_for_update(
    tracker: Any, watcher: str, namespace: str = NAMESPACE
) -> asyncio.Task[Update]:
    """Begin a watch that waits for a change after the current state."""
    seen = await look(tracker, watcher, namespace)
    task = asyncio.create_task(tracker.watch(namespace, watcher, seen.epoch, seen.revision, 60.0))
    await let_others_run()
    assert not task.done()
    return task


async def let_others_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
