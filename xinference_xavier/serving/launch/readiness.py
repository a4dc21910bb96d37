"""Lets a launch wait until its replicas can serve each other, and have fetched what their peers use
most.

An engine is ready before its transfer process, which has to import torch. If requests came then,
each replica would compute what another one has.
"""

import asyncio
import logging
from typing import Any

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.protocol.tracker import Member, tracker_uid
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.deadline import within

logger = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # between two questions; a thousand replicas may ask
_CALL_TIMEOUT = 5.0


async def members_of(replica: str, config: XavierConfig) -> list[Member]:
    """The members that belong to xinference's `replica`. Raises whatever xoscar raises."""
    finding = xoscar.actor_ref(config.tracker_address, tracker_uid(config.model_uid))
    tracker = await within(_CALL_TIMEOUT, finding)
    members: list[Member] = await within(_CALL_TIMEOUT, tracker.members_of(replica))
    return members


async def wait_until_serving(worker: Any, replica: str, config: XavierConfig, engines: int) -> None:
    """Return when peers can fetch from all `engines` of `replica` and these have what they fetch at
    their start, or when its model on `worker` is gone or another one, or after half a minute and
    the time for these fetches."""
    try:
        await within(_PATIENCE + config.warm_join, _until_serving(worker, replica, config, engines))
    except TimeoutError:
        logger.warning(
            "peers cannot fetch from this replica yet; `xinference-xavier doctor` says why: "
            "replica=%s",
            replica,
        )


async def _until_serving(worker: Any, replica: str, config: XavierConfig, engines: int) -> None:
    model = worker._model_uid_to_model.get(replica)
    pause = _FIRST_PAUSE
    while worker._model_uid_to_model.get(replica) is model:
        try:
            members = await members_of(replica, config)
        except Exception as error:  # whatever it is, the model serves
            logger.debug("cannot ask who serves: replica=%s error=%r", replica, error)
            members = []
        # One that was lost a moment ago may still be among them.
        if len(members) >= engines and all(member.serves for member in members):
            await _until_warm(members, config)
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


async def _until_warm(members: list[Member], config: XavierConfig) -> None:
    """Their replicas end it in time; those that do not answer are lost, or will take requests."""

    async def wait(member: Member) -> None:
        finding = xoscar.actor_ref(member.address, replica_uid(member.incarnation))
        actor = await within(_CALL_TIMEOUT, finding)
        await within(_CALL_TIMEOUT + config.warm_join, actor.warm_join())

    waits = (wait(member) for member in members)
    for outcome in await asyncio.gather(*waits, return_exceptions=True):
        if isinstance(outcome, BaseException):
            logger.debug("cannot wait for a warm join: error=%r", outcome)
