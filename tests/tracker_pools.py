"""A tracker in this process, calls to it, and a program with one that tests may suspend or kill."""

import asyncio
from typing import Any, TypeVar

import xoscar as xo

from xinference_xavier.protocol.tracker import Member, News, Settings, Update, tracker_uid
from xinference_xavier.tracker.actor import BlockTracker

T = TypeVar("T", bound=News)
MODEL = "model"
NAMESPACE = "namespace"

TRACKER_PROCESS = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
import xoscar as xo
from xinference_xavier.tracker.actor import BlockTracker
from xinference_xavier.protocol.tracker import tracker_uid

async def main():
    loop = asyncio.get_running_loop()
    # All default threads are taken, as in xinference's supervisor on two processors.
    loop.set_default_executor(ThreadPoolExecutor(1))
    reading = loop.run_in_executor(None, sys.stdin.read)
    pool = await xo.create_actor_pool("127.0.0.1:0", n_process=0, use_uvloop=False)
    await xo.create_actor(
        BlockTracker, sys.argv[1], address=pool.external_address, uid=tracker_uid(sys.argv[1])
    )
    print(pool.external_address, flush=True)
    # This process ends with its parent.
    await reading

asyncio.run(main())
"""


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
