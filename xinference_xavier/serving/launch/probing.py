"""Gives the probes of this worker's replicas to their models: see `engine.probes`.

A replica has no way to give its engine a request, and no text of its own. So the worker asks each
replica now and then what it wants computed, and calls the model as a client would.
"""

import asyncio
import logging
from typing import Any

import xoscar

from xinference_xavier.config import XavierConfig
from xinference_xavier.runtime.addresses import replica_uid
from xinference_xavier.runtime.deadline import within
from xinference_xavier.runtime.rate_limited_log import RateLimitedLog
from xinference_xavier.serving.launch.readiness import members_of

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _PAUSE = 0.5, 10.0  # seconds: until the canary was computed, and for audits
_PATIENCE = 60  # first pauses
_CALL_TIMEOUT, _PROBE_TIMEOUT = 5.0, 120.0


async def keep_probing(worker: Any, replica: str, config: XavierConfig) -> None:
    """Until the model of `replica` on `worker` is gone or another one."""
    model = worker._model_uid_to_model.get(replica)
    log = RateLimitedLog(logger)
    rounds = 0
    while worker._model_uid_to_model.get(replica) is model:
        quiet = False
        try:
            quiet = not await _probe(model, replica, config)
        except Exception as error:  # whatever it is, the model serves
            log.warn("probe", "cannot probe: replica=%s error=%r", replica, error)
        rounds += 1
        await asyncio.sleep(_PAUSE if quiet or rounds > _PATIENCE else _FIRST_PAUSE)


async def _probe(model: Any, replica: str, config: XavierConfig) -> bool:
    """Whether there was something to compute, or the replica has not joined yet."""
    members = await members_of(replica, config)
    probed = not members
    for incarnation, address, _ in members:
        actor = await within(_CALL_TIMEOUT, xoscar.actor_ref(address, replica_uid(incarnation)))
        probe = await within(_CALL_TIMEOUT, actor.next_probe())
        if probe is not None:
            probed = True
            tokens, salt = probe
            # xinference 4.0 would drop a salt in the settings.
            prompt = {"prompt": "", "prompt_token_ids": tokens, "cache_salt": salt}
            await within(_PROBE_TIMEOUT, model.generate(prompt, {"max_tokens": 1}))
    return probed
