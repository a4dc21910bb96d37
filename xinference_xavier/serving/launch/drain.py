"""Drains a replica before xinference removes it.

Routers send it nothing more, its answers end, and its peers fetch what only it holds, within the
`xavier_drain` of its launch. Whatever fails meanwhile costs the rest of that: the removal goes on.

A model that is terminated as a whole is not drained. A reload needs nothing here: xinference allows
it for a single replica only, and lets its answers end by itself.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from xinference_xavier.limits import CALL_DEADLINE, LOOK
from xinference_xavier.protocol.load import Drain
from xinference_xavier.protocol.tracker import tracker_uid
from xinference_xavier.runtime.aio import Rollback, ask, within
from xinference_xavier.serving import seam
from xinference_xavier.serving.launch import Method, own_trackers

logger = logging.getLogger(__name__)

_LOOKS = 3
"""So many looks in a row find it at rest: a request may have been on its way to it."""

_draining: set[tuple[str, str]] = set()
"""Replicas that are being removed through this process, by control address and name."""


def passes_over(supervisor: Any, model_uid: str, model: Any) -> bool:
    """True if a round-robin request does not go to `model`: its replica drains, and another does
    not. Without tracker or router, requests go round-robin."""
    if not _draining:
        return False
    address = seam.control_address(supervisor)
    active = seam.active_replicas(supervisor, model_uid)
    stay = {seam.replica_name(model_uid, each) for each in active}
    stay -= {replica for at, replica in _draining if at == address}
    return bool(stay) and seam.name_of(model) not in stay


class Removal:
    def __init__(self, supervisor: Any, model_uid: str, replica: str) -> None:
        self._supervisor = supervisor
        self._tracker = seam.control_address(supervisor), tracker_uid(model_uid)
        self._replica = replica
        self._drain = Drain()
        self._at_rest = asyncio.Event()

    @asynccontextmanager
    async def draining(self) -> AsyncIterator[None]:
        """Begins when the replica is at rest or has had its time; at once without a tracker. To the
        end, the tracker is told again and again that it drains."""
        async with Rollback() as scope:  # never committed
            try:
                self._drain = await self._ask("drain")
                if self._drain.seconds:
                    scope.undo(asyncio.ensure_future(self._look()).cancel)
                    with suppress(TimeoutError):
                        await within(self._drain.seconds, self._at_rest.wait())
                    await self._ask("drained", self._drain.requests, self._drain.chunks)
            except Exception as error:
                text = "tracker does not answer while a replica is removed: replica=%s error=%r"
                logger.warning(text, self._replica, error)
            if self._drain.requests:
                text = "replica is removed before its requests end: replica=%s requests=%d"
                logger.warning(text, self._replica, self._drain.requests)
            yield

    async def undo(self) -> None:
        await self._ask("undrain")

    async def _look(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(LOOK)
            looks = looks + 1 if await self._rests() else 0
            if looks == _LOOKS:
                self._at_rest.set()

    async def _rests(self) -> bool:
        drain, answering = await asyncio.gather(self._drained(), self._answering())
        requests = max(drain.requests, answering)
        self._drain = drain._replace(requests=requests)
        return not (requests or drain.handing_over)

    async def _drained(self) -> Drain:
        """How far the tracker says that it is."""
        try:
            drain: Drain = await self._ask("drain")
        except Exception as error:  # replicas fill a new tracker, but what runs is known without it
            logger.debug("tracker does not answer: replica=%s error=%r", self._replica, error)
            return Drain()
        return drain

    async def _answering(self) -> int:
        """The answers that xinference has not handed out completely; 0 if it does not say."""

        async def ask_worker() -> int:
            worker = seam.worker_of(self._supervisor, self._replica)
            return await seam.answering(await worker.get_model(model_uid=self._replica))

        try:
            return await within(CALL_DEADLINE, ask_worker())
        except Exception as error:
            logger.debug("replica does not answer: replica=%s error=%r", self._replica, error)
            return 0

    async def _ask(self, method: str, *args: object) -> Any:
        return await ask(CALL_DEADLINE, *self._tracker, method, self._replica, *args)


def draining_removal(original: Method) -> Method:
    """Wraps SupervisorActor.terminate_model_replica. A removal that fails or is cancelled leaves a
    replica that gets requests again."""

    @functools.wraps(original)
    async def terminate(
        supervisor: Any, model_uid: str, replica_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        replica = seam.replica_name(model_uid, replica_id)
        is_here = replica_id in seam.active_replicas(supervisor, model_uid)
        if not is_here or model_uid not in own_trackers(supervisor):
            return await original(supervisor, model_uid, replica_id, *args, **kwargs)
        removal = Removal(supervisor, model_uid, replica)
        mark = (seam.control_address(supervisor), replica)
        _draining.add(mark)
        try:
            async with Rollback() as scope:
                scope.undo(removal.undo)
                async with removal.draining():
                    result = await original(supervisor, model_uid, replica_id, *args, **kwargs)
                scope.commit()
            return result
        finally:
            _draining.discard(mark)

    return terminate
