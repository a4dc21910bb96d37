"""What routers learn of a model: the index of its largest namespace and the loads of all replicas.

Runs on the tracker's event loop. A router is not a member: it holds nothing, and the tracker keeps
nothing of it.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from xinference_xavier.protocol.load import Load, Observation, ScheduledPrompt
from xinference_xavier.tracker.loads import Loads
from xinference_xavier.tracker.namespaces import Namespaces
from xinference_xavier.tracker.watchers import WatcherBatcher

LISTENS_FOR = 10.0
"""Seconds after its last call in which a router is expected to call again."""
_COUNTED_AS = 20
"""Watchers: a router learns of changes every 10 ms at most."""
_ROUTER = "\0"  # the name of no replica


class Observers:
    def __init__(
        self,
        namespaces: Namespaces,
        name_of: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespaces = namespaces
        self._name_of = name_of
        self._clock = clock
        self._loads = Loads()
        self._batcher = WatcherBatcher()
        self._waiting = 0
        self._listened = -LISTENS_FOR
        self._ended = False
        namespaces.on_change = self._changed

    @property
    def listening(self) -> bool:
        """Whether there is a router."""
        return self._waiting > 0 or self._clock() < self._listened + LISTENS_FOR

    def report(self, incarnation: str, load: Load, prompts: Iterable[ScheduledPrompt]) -> None:
        # Nobody waits for prompts without a router. They may be long.
        heard = prompts if self.listening else ()
        self._loads.report(incarnation, load, heard, self._clock())
        self._changed()

    def forget(self, incarnation: str) -> None:
        self._loads.forget(incarnation)
        self._changed()

    def _changed(self) -> None:
        if self.listening:
            self._batcher.notify(_COUNTED_AS)

    async def wait(self, epoch: str, revision: int, version: int, timeout: float) -> Observation:
        """See `BlockTracker.observe`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        self._waiting += 1
        try:
            while not self._has_news(epoch, revision, version):
                left = deadline - loop.time()
                if left <= 0:
                    break
                await self._batcher.wait(left)
        finally:
            self._waiting -= 1
            self._listened = self._clock()
        found = self._namespaces.largest()
        update = None if found is None else found.index.changes_since(epoch, revision, _ROUTER)
        return Observation(update, *self._loads.since(version, self._name_of, self._clock()))

    def _has_news(self, epoch: str, revision: int, version: int) -> bool:
        if self._ended:
            return True
        if self._batcher.pending:
            return False
        found = self._namespaces.largest()
        changed = found is not None and found.index.has_update(_ROUTER, epoch, revision)
        return changed or self._loads.version != version

    def end(self) -> None:
        """Release all that wait."""
        self._ended = True
        self._batcher.notify_now()
