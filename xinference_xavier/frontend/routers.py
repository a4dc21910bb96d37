"""The routers of all models, each of which is informed by its model's tracker.

No request waits for a tracker: a model's first requests are not routed.

Threading: one event loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from cachetools import TTLCache

from xinference_xavier.errors import NotFoundError
from xinference_xavier.frontend.model_router import ModelRouter
from xinference_xavier.limits import CALL_DEADLINE, LIMIT
from xinference_xavier.runtime.aio import CANCEL_GRACE, within
from xinference_xavier.runtime.backoff import Backoff
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

WATCH = 10.0
"""Seconds that an observation may wait for news."""
_PIECE_PAUSE = 0.0005
_MAX_BACKOFF = 2.0  # seconds
_ASK_AGAIN = 2.0
"""Seconds after which a model that did not share is looked for again."""

Find = Callable[[str], Awaitable[Any]]
"""Returns a reference to the tracker of a model. Raises NotFoundError for one that does not
share."""


class Routers:
    def __init__(self, find: Find) -> None:
        self._find = find
        self._log = RateLimitedLog(logger)
        self._routers: dict[str, ModelRouter] = {}
        # Those of earlier trackers, by model, whose requests have not ended.
        self._former: dict[str, list[ModelRouter]] = {}
        self._looking: dict[str, asyncio.Future[None]] = {}
        # Models that did not share lately.
        self._absent: TTLCache[str, None] = TTLCache(LIMIT, _ASK_AGAIN)

    def get(self, model_uid: str) -> ModelRouter | None:
        """None while the model is not known to share; it is looked for in the background."""
        router = self._routers.get(model_uid)
        if model_uid not in self._looking and model_uid not in self._absent:
            self._looking[model_uid] = asyncio.ensure_future(self._run(model_uid))
        return router

    async def close(self) -> None:
        """End all observations, and leave the trackers time to hear of it."""
        for looking in self._looking.values():
            looking.cancel()
        await asyncio.sleep(CANCEL_GRACE)

    async def _run(self, model_uid: str) -> None:
        """Observe the model until it no longer shares."""
        try:
            await self._observe(model_uid)
        except NotFoundError:
            self._absent[model_uid] = None
        finally:
            del self._looking[model_uid]
            if (router := self._routers.pop(model_uid, None)) is not None:
                self._retire(model_uid, router)

    async def _observe(self, model_uid: str) -> None:
        router, backoff = ModelRouter(), Backoff(most=_MAX_BACKOFF, jitter=True)
        while True:
            try:
                tracker = await self._find(model_uid)
                while True:
                    if not await observe(tracker, router):
                        self._retire(model_uid, router)
                        router = ModelRouter()
                        continue
                    self._routers[model_uid] = router
                    self._follow(model_uid, router)
                    backoff.reset()
            except NotFoundError:
                raise
            except Exception:
                router.counts.failures += 1
                router.admit()  # what is known of the replicas may have expired
                self._log.warn(model_uid, "no news for routing: model=%s", model_uid, exc_info=True)
            await asyncio.sleep(backoff.pause())

    def _retire(self, model_uid: str, router: ModelRouter) -> None:
        router.close()
        if router.has_requests:
            self._former.setdefault(model_uid, []).append(router)

    def _follow(self, model_uid: str, router: ModelRouter) -> None:
        for former in self._former.pop(model_uid, ()):
            former.follow(router)
            if former.has_requests:
                self._former.setdefault(model_uid, []).append(former)


async def observe(tracker: Any, router: ModelRouter) -> bool:
    """Let `router` know what is new. Waits for news. False if this is another tracker than before:
    the model may have been launched again, with other settings."""
    index = router.index
    call = tracker.observe(index.epoch, index.revision, router.version, WATCH)
    news = await within(WATCH + CALL_DEADLINE, call)
    if news.complete and router.version:
        return False
    for _ in router.observe(news):
        await asyncio.sleep(_PIECE_PAUSE)
    return True
